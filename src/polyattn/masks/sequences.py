"""Masks that separate sequences: padding, packing, segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from polyattn.errors import InvalidProblem
from polyattn.masks.base import Full, Mask
from polyattn.masks.fits import fits, misfit
from polyattn.masks.index import Align, Index
from polyattn.masks.needs import Arrays, Call, Shape, Sizes, Writer
from polyattn.masks.payload import at, describe, integers, shape_of, store

__all__ = ["LeftPadding", "Packed", "Padding", "Segments"]


@dataclass(frozen=True, repr=False, eq=False)
class Padding(Mask):
    """Queries and keys past a length are masked; the output of such queries is 0.

    `q_lengths`, `kv_lengths`: (B,) integers, or None for no padding on that side.

    >>> print(Padding(q_lengths=[3], kv_lengths=[2]).picture())
    ##..
    ##..
    ##..
    ....
    """

    q_lengths: Any = None
    kv_lengths: Any = None

    takes_align = False

    def __post_init__(self) -> None:
        for name in ("q_lengths", "kv_lengths"):
            store(self, name, integers(f"Padding({name}=...)", getattr(self, name), (1,), "(B,)"))

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.q_lengths, self.kv_lengths)

    @property
    def signature(self) -> str:
        return f"Padding(q={describe(self.q_lengths)}, kv={describe(self.kv_lengths)})"

    def allows(self, ix: Index) -> Any:
        allowed = (ix.t >= 0) & (ix.j >= 0)
        if self.q_lengths is not None:
            allowed = allowed & (ix.t < at(self.q_lengths, ix.b))
        if self.kv_lengths is not None:
            allowed = allowed & (ix.j < at(self.kv_lengths, ix.b))
        return allowed

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        return Padding(change("q_lengths", self.q_lengths), change("kv_lengths", self.kv_lengths))

    def simplified(self, q_len: int, kv_len: int, offset: int) -> Mask:
        return Full() if self.q_lengths is None and self.kv_lengths is None else self

    def check(self, call: Call) -> None:
        fits(self, self.q_lengths, call, call.q_len)
        fits(self, self.kv_lengths, call, call.kv_len)

    def write(self, to: Writer) -> None:
        if self.q_lengths is None and self.kv_lengths is None:
            to.everything()
        if self.q_lengths is not None:
            to.query_limit(self.q_lengths)
        if self.kv_lengths is not None:
            to.key_limit(self.kv_lengths)
            if self.q_lengths is not None:
                to.both()

    @classmethod
    def draw(cls, rng: Random, align: Align, packed: bool) -> tuple[Any, ...]:
        return rng.choice(((True, True), (False, True), (True, False)))

    @classmethod
    def brackets(cls, sizes: Sizes, queries: bool = False, keys: bool = True) -> tuple[Any, ...]:
        return tuple(sizes.b if on else None for on in (queries, keys))

    @classmethod
    def filled(cls, sizes: Sizes, arrays: Arrays, q: Shape | None, kv: Shape | None) -> Mask:
        return cls(
            None if q is None else arrays.lengths(q, sizes.t),
            None if kv is None else arrays.lengths(kv, sizes.s),
        )


@dataclass(frozen=True, repr=False, eq=False)
class LeftPadding(Mask):
    """Queries and keys before a start are masked; the output of such queries is 0.

    `q_starts`, `kv_starts`: (B,) integers, or None for no padding on that side: how many tokens of
    padding each batch entry begins with.

    >>> print(LeftPadding(kv_starts=[1]).picture(2, 4))
    .###
    .###
    >>> print((~LeftPadding(q_starts=[1], kv_starts=[2])).picture())
    ####
    ##..
    ##..
    ##..
    """

    q_starts: Any = None
    kv_starts: Any = None

    takes_align = False

    def __post_init__(self) -> None:
        for name in ("q_starts", "kv_starts"):
            what = f"LeftPadding({name}=...)"
            store(self, name, integers(what, getattr(self, name), (1,), "(B,)"))

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.q_starts, self.kv_starts)

    @property
    def signature(self) -> str:
        return f"LeftPadding(q={describe(self.q_starts)}, kv={describe(self.kv_starts)})"

    def allows(self, ix: Index) -> Any:
        allowed = (ix.t >= 0) & (ix.j >= 0)
        if self.q_starts is not None:
            allowed = allowed & (ix.t >= at(self.q_starts, ix.b))
        if self.kv_starts is not None:
            allowed = allowed & (ix.j >= at(self.kv_starts, ix.b))
        return allowed

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        return LeftPadding(change("q_starts", self.q_starts), change("kv_starts", self.kv_starts))

    def simplified(self, q_len: int, kv_len: int, offset: int) -> Mask:
        return Full() if self.q_starts is None and self.kv_starts is None else self

    def check(self, call: Call) -> None:
        fits(self, self.q_starts, call, call.q_len, "start")
        fits(self, self.kv_starts, call, call.kv_len, "start")

    def write(self, to: Writer) -> None:
        if self.q_starts is None and self.kv_starts is None:
            to.everything()
        if self.q_starts is not None:
            to.query_start(self.q_starts)
        if self.kv_starts is not None:
            to.key_start(self.kv_starts)
            if self.q_starts is not None:
                to.both()

    @classmethod
    def draw(cls, rng: Random, align: Align, packed: bool) -> tuple[Any, ...]:
        return rng.choice(((True, True), (False, True), (True, False)))

    @classmethod
    def brackets(cls, sizes: Sizes, queries: bool = False, keys: bool = True) -> tuple[Any, ...]:
        return tuple(sizes.b if on else None for on in (queries, keys))

    @classmethod
    def filled(cls, sizes: Sizes, arrays: Arrays, q: Shape | None, kv: Shape | None) -> Mask:
        return cls(
            None if q is None else arrays.starts(q, sizes.t),
            None if kv is None else arrays.starts(kv, sizes.s),
        )


@dataclass(frozen=True, repr=False, eq=False)
class Packed(Mask):
    """Several sequences in one row of tokens, each by itself; for ``layout="packed"``.

    `cu_q`, `cu_kv`: (sequences + 1,) int32 offsets from 0 to the total length. The masks it is
    joined with apply within each sequence, and their batch entry is the sequence.

    >>> from polyattn import Causal
    >>> Packed([0, 2, 5], [0, 2, 5]) & Causal()
    Packed(q=3, kv=3) & Causal()
    """

    cu_q: Any
    cu_kv: Any = None

    takes_align = False
    weight = 0  # it comes with the layout

    def __post_init__(self) -> None:
        store(self, "cu_q", integers("Packed(cu_q=...)", self.cu_q, (1,), "(sequences + 1,)"))
        both = self.cu_q if self.cu_kv is None else self.cu_kv
        store(self, "cu_kv", integers("Packed(cu_kv=...)", both, (1,), "(sequences + 1,)"))
        if shape_of(self.cu_q) != shape_of(self.cu_kv) or shape_of(self.cu_q)[0] < 1:
            raise InvalidProblem(
                f"got Packed with {shape_of(self.cu_q)} query and {shape_of(self.cu_kv)} key "
                "offsets, expected as many of both: one more than there are sequences."
            )

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.cu_q, self.cu_kv)

    @property
    def signature(self) -> str:
        return f"Packed(q={describe(self.cu_q)}, kv={describe(self.cu_kv)})"

    def allows(self, ix: Index) -> Any:
        return ix.same_sequence & (ix.t >= 0) & (ix.j >= 0)

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        return Packed(change("cu_q", self.cu_q), change("cu_kv", self.cu_kv))

    def check(self, call: Call) -> None:
        for name, cu, total in (
            ("cu_q", self.cu_q, call.q_len),
            ("cu_kv", self.cu_kv, call.kv_len),
        ):
            read = call.known(cu)
            if read is None or not read.shape[0]:
                continue
            if int(read[0]) != 0 or int(read[-1]) != total or bool((read[1:] < read[:-1]).any()):
                raise InvalidProblem(
                    f"got {name}={read.tolist()[:8]}, expected offsets that rise from 0 to {total}."
                )

    @classmethod
    def brackets(cls, sizes: Sizes) -> tuple[Any, ...]:
        return sizes.b + 1, sizes.b + 1

    @classmethod
    def filled(cls, sizes: Sizes, arrays: Arrays, q: Shape, kv: Shape) -> Mask:
        return cls(arrays.offsets(q, sizes.t), arrays.offsets(kv, sizes.s))


@dataclass(frozen=True, repr=False, eq=False)
class Segments(Mask):
    """A query attends only keys of its own segment.

    `q_ids`: (T,) or (B, T) integers; `kv_ids`: (S,) or (B, S), the same as `q_ids` when None.
    When packed, one id for each token of the row.

    With ``& Causal()`` segments are documents, each causal by itself.

    >>> print(Segments([0, 0, 1, 1]).picture())
    ##..
    ##..
    ..##
    ..##
    """

    q_ids: Any
    kv_ids: Any = None

    takes_align = False

    def __post_init__(self) -> None:
        store(self, "q_ids", integers("Segments(q_ids=...)", self.q_ids, (1, 2), "(T,) or (B, T)"))
        both = self.q_ids if self.kv_ids is None else self.kv_ids
        store(self, "kv_ids", integers("Segments(kv_ids=...)", both, (1, 2), "(S,) or (B, S)"))

    @classmethod
    def of_lengths(cls, lengths: Any) -> Segments:
        """Return the segments of documents that lie one after the other, with so many tokens each.

        `lengths`: integers, which are read here; all tokens are in one of the documents.

        >>> from polyattn import Causal
        >>> print((Segments.of_lengths([1, 3]) & Causal()).picture())
        #...
        .#..
        .##.
        .###
        """
        counts = integers("Segments.of_lengths(lengths)", lengths, (1,), "(documents,)")
        counts = counts if isinstance(counts, tuple) else counts.tolist()
        if min(counts, default=0) < 0:
            raise InvalidProblem(
                f"got Segments.of_lengths({[*counts]}), expected numbers of tokens, 0 or more."
            )
        return cls([number for number, count in enumerate(counts) for _ in range(count)])

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.q_ids, self.kv_ids)

    @property
    def signature(self) -> str:
        return f"Segments(q={describe(self.q_ids)}, kv={describe(self.kv_ids)})"

    def allows(self, ix: Index) -> Any:
        q_id = _token(self.q_ids, ix.b, ix.t, ix.q_token)
        return q_id == _token(self.kv_ids, ix.b, ix.j, ix.kv_token)

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        return Segments(change("q_ids", self.q_ids), change("kv_ids", self.kv_ids))

    def check(self, call: Call) -> None:
        b = call.batch
        for ids, length in ((self.q_ids, call.q_len), (self.kv_ids, call.kv_len)):
            if shape_of(ids) not in ((length,), (b, length), (1, length)):
                misfit(self, shape_of(ids), f"({length},) or ({b}, {length})")

    def write(self, to: Writer) -> None:
        if to.packed and 2 in (len(shape_of(self.q_ids)), len(shape_of(self.kv_ids))):
            to.unknown()  # the kernels look ids up by the token of the row
        else:
            to.same_ids(self.q_ids, self.kv_ids)

    @classmethod
    def draw(cls, rng: Random, align: Align, packed: bool) -> tuple[Any, ...]:
        return not packed and rng.random() < 0.5, True

    @classmethod
    def brackets(cls, sizes: Sizes, batched: bool = True, own_keys: bool = True) -> tuple[Any, ...]:
        own_keys = own_keys or sizes.s != sizes.t
        q, kv = ((sizes.b, x) if batched else x for x in (sizes.t, sizes.s))
        return q, kv if own_keys else None

    @classmethod
    def filled(cls, sizes: Sizes, arrays: Arrays, q: Shape, kv: Shape | None) -> Mask:
        return cls(arrays.ids(q), None if kv is None else arrays.ids(kv))


def _token(ids: Any, b: Any, position: Any, packed: Any) -> Any:
    if len(shape_of(ids)) == 1:
        return at(ids, position if packed is None else packed)
    return at(ids, b * (shape_of(ids)[0] > 1), position)
