"""What masks ask of those who use them: sizes, arrays, a place to write terms, bounds of a call.

Masks know no array library and no kernel. Each user hands over one of these, and every class of
masks then works with it: nobody else lists the classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

__all__ = ["Arrays", "Call", "Shape", "Sizes", "Writer", "dims_of"]

Shape = int | tuple[int, ...]
"""The shape of an array as a signature prints it: a number where there is one dim."""


def dims_of(shape: Shape) -> tuple[int, ...]:
    """Return all dims of a printed shape.

    >>> dims_of(3), dims_of((2, 5))
    ((3,), (2, 5))
    """
    return (shape,) if isinstance(shape, int) else shape


class Sizes(NamedTuple):
    """The sizes for which an example is made; `b` counts sequences when they are packed."""

    b: int
    t: int
    s: int
    n: int


class Arrays(Protocol):
    """Makes the arrays of examples: of the right shapes, with contents that fit the call."""

    def lengths(self, shape: Shape, most: int) -> Any:
        """Return one length of 0 to `most` for each batch entry or sequence."""

    def starts(self, shape: Shape, most: int) -> Any:
        """Return where each batch entry or sequence begins after its padding, 0 to `most`."""

    def ids(self, shape: Shape) -> Any:
        """Return the number of the segment of each token."""

    def offsets(self, shape: Shape, total: int) -> Any:
        """Return where packed sequences begin, from 0, and `total`."""

    def blocks(self, shape: Shape, columns: int) -> tuple[Any, Any]:
        """Return the indices (of `shape`) and the counts of a block map of `columns` blocks."""

    def booleans(self, shape: Shape) -> Any:
        """Return which entries may be attended."""


class Writer(Protocol):
    """Takes down what a mask means, in the terms of the native kernels and in postfix order."""

    packed: bool
    """Whether sequences are packed, so that ids are told by token and not by batch entry."""

    def unknown(self) -> None:
        """Say that no terms mean it: the kernels get it entry by entry."""

    def everything(self) -> None:
        """Write what hides nothing."""

    def band(self, low: int | None, high: int | None) -> None:
        """Write: key minus the query's own position is `low` to `high`; None is unbounded."""

    def query_limit(self, lengths: Any) -> None:
        """Write: the query is before the length of its batch entry."""

    def key_limit(self, lengths: Any) -> None:
        """Write: the key is before the length of its batch entry."""

    def same_ids(self, q_ids: Any, kv_ids: Any) -> None:
        """Write: query and key have the same id."""

    def blocks(self, mask: Any) -> None:
        """Write: the BlockMap lists the block."""

    def dense(self, allowed: Any) -> None:
        """Write: the boolean array, which broadcasts to (B, N, T, S), says so."""

    def both(self) -> None:
        """Join the last two by "and"."""

    def either(self) -> None:
        """Join the last two by "or"."""


class Call(NamedTuple):
    """What the arrays of a mask have to fit. When packed, lengths count the tokens of the row.

    `known` returns a payload as an array, or None where reading its entries is not possible or
    not worth its price; `arange` counts from 0 in the same library.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int
    packed: bool
    known: Callable[[Any], Any]
    arange: Callable[[int], Any]
