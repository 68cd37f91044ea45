"""Masks that list what may be seen: block by block, or entry by entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from polyattn.errors import InvalidProblem
from polyattn.masks.base import Mask
from polyattn.masks.fits import broadcasts, misfit
from polyattn.masks.index import Align, Index
from polyattn.masks.needs import Arrays, Call, Shape, Sizes, Writer
from polyattn.masks.payload import at, describe, integers, shape_of, store

__all__ = ["BlockMap", "Dense"]


@dataclass(frozen=True, repr=False, eq=False)
class BlockMap(Mask):
    """Per batch entry, head and block of queries, the blocks of keys to visit, wholly dense.

    `indices`: (B, N, ceil(T / block_q), M) int32, of which the first
    `counts`: (B, N, ceil(T / block_q)) int32 of each row are meant; B and N may be 1. Blocks
    at the edges may be partial. It is the only contract between sparse selection and compute.

    >>> print(BlockMap(2, 2, [[[[0, 0], [0, 1]]]], [[[1, 2]]]).picture())
    ##..
    ##..
    ####
    ####
    """

    block_q: int
    block_k: int
    indices: Any
    counts: Any
    bits: Any = field(default=None)  # (B, N, blocks of T, blocks of S) bool, made by a front-end

    packs = False
    takes_align = False

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise InvalidProblem(f"got BlockMap({name}={size!r}), expected a size >= 1.")
        store(self, "indices", integers("BlockMap(indices)", self.indices, (4,), "(B, N, nQ, M)"))
        store(self, "counts", integers("BlockMap(counts)", self.counts, (3,), "(B, N, nQ)"))
        if shape_of(self.indices)[:3] != shape_of(self.counts):
            raise InvalidProblem(
                f"got BlockMap indices of shape {shape_of(self.indices)} with counts of shape "
                f"{shape_of(self.counts)}, expected (B, N, nQ, M) with (B, N, nQ)."
            )

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.block_q, self.block_k, self.indices, self.counts)

    @property
    def signature(self) -> str:
        return f"BlockMap({self.block_q}, {self.block_k}, {describe(self.indices)})"

    def allows(self, ix: Index) -> Any:
        row, block = ix.t // self.block_q, ix.j // self.block_k
        if self.bits is not None:
            b, n = (i * (size > 1) for i, size in zip((ix.b, ix.n), self.bits.shape, strict=False))
            return self.bits[b, n, row, block]
        count = at(self.counts, ix.b, ix.n, row)
        return any(at(self.indices, ix.b, ix.n, row, m) == block for m in range(int(count)))

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        indices, counts = change("indices", self.indices), change("counts", self.counts)
        return BlockMap(self.block_q, self.block_k, indices, counts, self.bits)

    def check(self, call: Call) -> None:
        b, n = call.batch, call.heads
        rows, blocks = -(-call.q_len // self.block_q), -(-call.kv_len // self.block_k)
        got = shape_of(self.counts)
        if got[0] not in (1, b) or got[1] not in (1, n) or got[2] != rows:
            misfit(self, got, f"counts ({b}|1, {n}|1, {rows}) for {rows} blocks of queries")
        indices, counts = call.known(self.indices), call.known(self.counts)
        if indices is None or counts is None or 0 in counts.shape:
            return
        most = indices.shape[-1]
        if int(counts.min()) < 0 or int(counts.max()) > most:
            raise InvalidProblem(
                f"got {self!r} with counts from {int(counts.min())} to {int(counts.max())}, "
                f"expected 0 to {most}, the last dim of indices."
            )
        meant = call.arange(most) < counts[..., None]
        if bool((meant & ((indices < 0) | (indices >= blocks))).any()):
            raise InvalidProblem(
                f"got {self!r} with a block index outside of 0 to {blocks - 1}, expected indices "
                f"of blocks of {self.block_k} keys out of {call.kv_len}."
            )

    def write(self, to: Writer) -> None:
        to.blocks(self)

    @classmethod
    def draw(cls, rng: Random, align: Align, packed: bool) -> tuple[Any, ...]:
        sizes = (rng.choice((1, 3, 4, 8, 16, 128)) for _ in range(2))
        return *sizes, rng.random() < 0.5, rng.random() < 0.5

    @classmethod
    def brackets(
        cls,
        sizes: Sizes,
        block_q: int = 128,
        block_k: int = 128,
        batch: bool = True,
        head: bool = True,
    ) -> tuple[Any, ...]:
        rows, columns = -(-sizes.t // block_q), -(-sizes.s // block_k)
        shape = (sizes.b if batch else 1, sizes.n if head else 1, rows, columns)
        return block_q, block_k, shape

    @classmethod
    def filled(
        cls, sizes: Sizes, arrays: Arrays, block_q: int, block_k: int, indices: Shape
    ) -> Mask:
        return cls(block_q, block_k, *arrays.blocks(indices, -(-sizes.s // block_k)))


@dataclass(frozen=True, repr=False, eq=False)
class Dense(Mask):
    """Any boolean array that broadcasts to (B, N, T, S); True = attend.

    >>> print(Dense([[True, False], [True, True]]).picture(2, 2))
    #.
    ##
    """

    mask: Any

    packs = False
    takes_align = False

    def __post_init__(self) -> None:
        store(
            self, "mask", integers("Dense(mask)", self.mask, (0, 1, 2, 3, 4), "(B, N, T, S)", True)
        )

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.mask,)

    @property
    def signature(self) -> str:
        return f"Dense({'x'.join(map(str, shape_of(self.mask)))})"

    def allows(self, ix: Index) -> Any:
        dims = shape_of(self.mask)
        where = (ix.b, ix.n, ix.t, ix.j)[4 - len(dims) :]
        if any(size > 1 for size in dims):
            return at(self.mask, *(i * (size > 1) for i, size in zip(where, dims, strict=True)))
        return (ix.t >= 0) & (at(self.mask, *(0 for _ in dims)) if dims else self.mask)

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        return Dense(change("mask", self.mask))

    def check(self, call: Call) -> None:
        full = (call.batch, call.heads, call.q_len, call.kv_len)
        broadcasts(self, shape_of(self.mask), full)

    def write(self, to: Writer) -> None:
        to.dense(self.mask)

    @classmethod
    def draw(cls, rng: Random, align: Align, packed: bool) -> tuple[Any, ...]:
        return ("".join(dim for dim in "bnts" if rng.random() < 0.7),)

    @classmethod
    def brackets(cls, sizes: Sizes, dims: str = "bts") -> tuple[Any, ...]:
        full = zip("bnts", (sizes.b, sizes.n, sizes.t, sizes.s), strict=True)
        return (tuple(size if dim in dims else 1 for dim, size in full),)

    @classmethod
    def filled(cls, sizes: Sizes, arrays: Arrays, mask: Shape = ()) -> Mask:
        return cls(arrays.booleans(mask))
