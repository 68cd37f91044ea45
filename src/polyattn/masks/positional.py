"""Masks that the positions alone determine, and the prefix mask built on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from polyattn.errors import InvalidProblem
from polyattn.masks.base import Align, Full, Index, Mask, store
from polyattn.masks.fits import fits
from polyattn.masks.needs import Arrays, Call, Shape, Sizes, Writer
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
    weight = 2

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.align,)

    @property
    def signature(self) -> str:
        return "Causal()" if self.align == "bottom_right" else "Causal('top_left')"

    def allows(self, ix: Index) -> Any:
        return ix.j <= ix.diagonal

    def simplified(self, q_len: int, kv_len: int, offset: int) -> Mask:
        return Full() if kv_len - 1 <= offset else self

    @property
    def band(self) -> tuple[int | None, int | None]:
        return None, 0

    @classmethod
    def draw(cls, rng: Random, align: Align, packed: bool) -> tuple[Any, ...]:
        return (align,)


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
    by_length = True
    weight = 2

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

    def simplified(self, q_len: int, kv_len: int, offset: int) -> Mask:
        left, right = self.left, self.right
        if left is not None and left >= q_len - 1 + offset:
            left = None
        if right is not None and right >= kv_len - 1 - offset:
            right = None
        return Full() if left is None and right is None else Window(left, right)

    @property
    def band(self) -> tuple[int | None, int | None]:
        return None if self.left is None else -self.left, self.right

    @classmethod
    def draw(cls, rng: Random, align: Align, packed: bool) -> tuple[Any, ...]:
        return tuple(rng.choice((None, 0, 1, 2, 5, 17)) for _ in range(2))

    @classmethod
    def brackets(
        cls, sizes: Sizes, left: int | None = 15, right: int | None = None
    ) -> tuple[Any, ...]:
        return left, right


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

    only_align = "bottom_right"

    def __post_init__(self) -> None:
        store(self, "lengths", integers("PrefixLM(lengths)", self.lengths, (1,), "(B,)"))

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.lengths,)

    @property
    def signature(self) -> str:
        return f"PrefixLM({describe(self.lengths)})"

    def allows(self, ix: Index) -> Any:
        return (ix.j < at(self.lengths, ix.b)) | (ix.j <= ix.diagonal)

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        return PrefixLM(change("lengths", self.lengths))

    def check(self, call: Call) -> None:
        fits(self, self.lengths, call, call.kv_len)

    def write(self, to: Writer) -> None:
        to.key_limit(self.lengths)
        to.band(None, 0)
        to.either()

    @classmethod
    def brackets(cls, sizes: Sizes) -> tuple[Any, ...]:
        return (sizes.b,)

    @classmethod
    def filled(cls, sizes: Sizes, arrays: Arrays, lengths: Shape) -> Mask:
        return cls(arrays.lengths(lengths, sizes.s))
