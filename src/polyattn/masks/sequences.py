"""Masks that separate sequences: padding, packing, segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyattn.errors import InvalidProblem
from polyattn.masks.base import Index, Mask, store
from polyattn.masks.payload import at, describe, integers, shape_of

__all__ = ["Packed", "Padding", "Segments"]


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


@dataclass(frozen=True, repr=False, eq=False)
class Segments(Mask):
    """A query attends only keys of its own segment.

    `q_ids`: (T,) or (B, T) integers; `kv_ids`: (S,) or (B, S), the same as `q_ids` when None.
    When packed, one id for each token of the row.

    >>> print(Segments([0, 0, 1, 1]).picture())
    ##..
    ##..
    ..##
    ..##
    """

    q_ids: Any
    kv_ids: Any = None

    def __post_init__(self) -> None:
        store(self, "q_ids", integers("Segments(q_ids=...)", self.q_ids, (1, 2), "(T,) or (B, T)"))
        both = self.q_ids if self.kv_ids is None else self.kv_ids
        store(self, "kv_ids", integers("Segments(kv_ids=...)", both, (1, 2), "(S,) or (B, S)"))

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


def _token(ids: Any, b: Any, position: Any, packed: Any) -> Any:
    if len(shape_of(ids)) == 1:
        return at(ids, position if packed is None else packed)
    return at(ids, b * (shape_of(ids)[0] > 1), position)
