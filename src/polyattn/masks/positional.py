"""Masks that the positions alone determine, and the prefix mask built on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyattn.errors import InvalidProblem
from polyattn.masks.base import Align, Index, Mask, store
from polyattn.masks.payload import at, describe, integers

__all__ = ["Causal", "PrefixLM", "Window"]


@dataclass(frozen=True, repr=False, eq=False)
class Causal(Mask):
    """A query attends its own position and what came before.

    `align` says where the diagonal lies when the lengths differ: ``bottom_right`` (default;
    the last query sees every key, as in decoding) or ``top_left`` (torch's ``is_causal``).

    >>> print(Causal().picture())
    #...
    ##..
    ###.
    ####
    >>> print(Causal().picture(2, 4)); print(Causal("top_left").picture(2, 4))
    ###.
    ####
    #...
    ##..
    """

    align: Align = "bottom_right"

    def __post_init__(self) -> None:
        if self.align not in ("bottom_right", "top_left"):
            raise InvalidProblem(
                f"got Causal(align={self.align!r}), expected 'bottom_right' or 'top_left'."
            )

    static = True

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.align,)

    @property
    def signature(self) -> str:
        return "Causal()" if self.align == "bottom_right" else "Causal('top_left')"

    def allows(self, ix: Index) -> Any:
        return ix.j <= ix.diagonal


@dataclass(frozen=True, repr=False, eq=False)
class Window(Mask):
    """A query attends at most `left` keys before and `right` keys after its own position.

    The counts are of *other* keys (a query always sees itself); ``None`` is unbounded. The
    position is measured on the alignment of the causal mask it is joined with, bottom-right
    otherwise.

    >>> print(Window(left=1, right=0).picture())
    #...
    ##..
    .##.
    ..##
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, count in (("left", self.left), ("right", self.right)):
            if count is not None and (type(count) is not int or count < 0):
                raise InvalidProblem(
                    f"got Window({name}={count!r}), expected a count of keys >= 0, or None for "
                    "unbounded (some libraries write -1 for that)."
                )

    static = True

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.left, self.right)

    @property
    def signature(self) -> str:
        return f"Window(left={self.left}, right={self.right})"

    def allows(self, ix: Index) -> Any:
        allowed = (ix.t >= 0) & (ix.j >= 0)
        if self.left is not None:
            allowed = allowed & (ix.j >= ix.diagonal - self.left)
        if self.right is not None:
            allowed = allowed & (ix.j <= ix.diagonal + self.right)
        return allowed


@dataclass(frozen=True, repr=False, eq=False)
class PrefixLM(Mask):
    """Keys before `lengths` are seen by every query; the rest is ``Causal()`` (bottom-right).

    `lengths`: (B,) integers.

    >>> print(PrefixLM([2]).picture())
    ##..
    ##..
    ###.
    ####
    """

    lengths: Any

    def __post_init__(self) -> None:
        store(self, "lengths", integers("PrefixLM(lengths)", self.lengths, (1,), "(B,)"))

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.lengths,)

    @property
    def signature(self) -> str:
        return f"PrefixLM({describe(self.lengths)})"

    @property
    def align(self) -> Align | None:
        return "bottom_right"

    def allows(self, ix: Index) -> Any:
        return (ix.j < at(self.lengths, ix.b)) | (ix.j <= ix.diagonal)

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        return PrefixLM(change("lengths", self.lengths))
