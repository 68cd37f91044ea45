"""Masks of regular patterns: chunks of positions, every so many keys, the first few keys."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from polyattn.errors import InvalidProblem
from polyattn.masks.base import Align, Full, Index, Mask, Not
from polyattn.masks.needs import Sizes

__all__ = ["Chunked", "Dilated", "FirstKeys"]


def _counted(what: str, number: Any, least: int) -> None:
    if type(number) is not int or number < least:
        raise InvalidProblem(f"got {what}={number!r}), expected a number of keys >= {least}.")


@dataclass(frozen=True, repr=False, eq=False)
class Chunked(Mask):
    """Positions are cut into chunks of `size`, and a query attends the keys of its own chunk.

    With ``& Causal()`` it is the local attention of Llama 4. The query's position is measured on
    the alignment of the causal mask it is joined with, bottom-right otherwise; where there are
    fewer keys than queries the first positions are negative, and so are their chunks, which no
    key is in.

    >>> from polyattn import Causal
    >>> print(Chunked(2).picture()); print((Chunked(3) & Causal()).picture(2, 5))
    ##..
    ##..
    ..##
    ..##
    ...#.
    ...##
    """

    size: int

    static = True
    by_length = True

    def __post_init__(self) -> None:
        _counted("Chunked(size", self.size, 1)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.size,)

    @property
    def signature(self) -> str:
        return f"Chunked({self.size})"

    def allows(self, ix: Index) -> Any:
        return ix.j // self.size == ix.diagonal // self.size

    def simplified(self, q_len: int, kv_len: int, offset: int) -> Mask:
        one = offset >= 0 and kv_len <= self.size and offset + q_len <= self.size
        return Full() if one else self

    def range_of_keys(self, first: int, last: int) -> tuple[int | None, int | None]:
        return first // self.size * self.size, (last // self.size + 1) * self.size

    @classmethod
    def draw(cls, rng: Random, align: Align, packed: bool) -> tuple[Any, ...]:
        return (rng.choice((1, 2, 3, 5, 8, 16, 64)),)

    @classmethod
    def brackets(cls, sizes: Sizes, size: int = 16) -> tuple[Any, ...]:
        return (size,)


@dataclass(frozen=True, repr=False, eq=False)
class Dilated(Mask):
    """A query attends the keys whose distance to its own position is a multiple of `step`.

    Joined with a window it is a dilated window (Longformer, arXiv 2004.05150), with a causal mask
    a strided one. The position is measured as that of `Window`.

    >>> from polyattn import Window
    >>> print((Dilated(2) & Window(left=4, right=0)).picture(6, 6))
    #.....
    .#....
    #.#...
    .#.#..
    #.#.#.
    .#.#.#
    """

    step: int

    static = True

    def __post_init__(self) -> None:
        _counted("Dilated(step", self.step, 1)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.step,)

    @property
    def signature(self) -> str:
        return f"Dilated({self.step})"

    def allows(self, ix: Index) -> Any:
        return (ix.j - ix.diagonal) % self.step == 0

    def simplified(self, q_len: int, kv_len: int, offset: int) -> Mask:
        return Full() if self.step == 1 else self

    @classmethod
    def draw(cls, rng: Random, align: Align, packed: bool) -> tuple[Any, ...]:
        return (rng.choice((1, 2, 3, 4, 7, 64)),)

    @classmethod
    def brackets(cls, sizes: Sizes, step: int = 4) -> tuple[Any, ...]:
        return (step,)


@dataclass(frozen=True, repr=False, eq=False)
class FirstKeys(Mask):
    """The first `count` keys, for every query; when packed, of its own sequence.

    What a window leaves out of a long text are above all its first tokens, which most of the
    attention falls on: ``Causal() & (Window(left=w) | FirstKeys(4))`` keeps them (StreamingLLM,
    arXiv 2309.17453).

    >>> from polyattn import Causal, Window
    >>> print((Causal() & (Window(left=1) | FirstKeys(1))).picture(5, 5))
    #....
    ##...
    ###..
    #.##.
    #..##
    """

    count: int

    static = True
    by_length = True
    takes_align = False

    def __post_init__(self) -> None:
        _counted("FirstKeys(count", self.count, 0)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.count,)

    @property
    def signature(self) -> str:
        return f"FirstKeys({self.count})"

    def allows(self, ix: Index) -> Any:
        return (ix.t >= 0) & (ix.j < self.count)

    def simplified(self, q_len: int, kv_len: int, offset: int) -> Mask:
        return Full() if self.count >= kv_len else self if self.count else Not(Full())

    def range_of_keys(self, first: int, last: int) -> tuple[int | None, int | None]:
        return 0, self.count

    @classmethod
    def draw(cls, rng: Random, align: Align, packed: bool) -> tuple[Any, ...]:
        return (rng.choice((0, 1, 2, 4, 17, 64)),)

    @classmethod
    def brackets(cls, sizes: Sizes, count: int = 4) -> tuple[Any, ...]:
        return (count,)
