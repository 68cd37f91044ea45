"""Masks that list what may be seen: block by block, or entry by entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from polyattn.errors import InvalidProblem
from polyattn.masks.base import Index, Mask, store
from polyattn.masks.payload import at, integers, shape_of

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
        b, n, nq, m = shape_of(self.indices)
        return f"BlockMap({self.block_q}, {self.block_k}, {b}x{n}x{nq}x{m})"

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


@dataclass(frozen=True, repr=False, eq=False)
class Dense(Mask):
    """Any boolean array that broadcasts to (B, N, T, S); True = attend.

    >>> print(Dense([[True, False], [True, True]]).picture(2, 2))
    #.
    ##
    """

    mask: Any

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
