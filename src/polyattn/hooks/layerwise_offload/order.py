"""The order in which units are used, learned from the calls themselves.

Nothing is assumed and nothing fails: what a model did last time is what it is expected to do this
time. Whoever does something else is noticed at the next unit that is known again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["LearnedOrder"]

_REMEMBERED = 16


class LearnedOrder:
    """What comes next, by what came after it the last time, for each kind of pass.

    A pass is one call of the model, or a backward pass; its kind (any name) tells passes that use
    units differently apart, such as an encoder's and a decoder's.

    >>> order = LearnedOrder([0, 1, 2])
    >>> order.begin("model"); order.used(0); list(order.expected())  # a guess, as they are written
    [1, 2]
    >>> order.used(2); order.end()
    >>> order.begin("model"); order.used(0); list(order.expected())  # as it was
    [2]
    """

    def __init__(self, guess: Sequence[int]) -> None:
        self._guess = list(guess)
        self._known: dict[str, list[int]] = {}
        self._kind: str | None = None
        self._seen: list[int] = []
        self._next = 0

    def begin(self, kind: str) -> None:
        """A pass of that kind begins."""
        self._kind, self._seen, self._next = kind, [], 0

    def end(self) -> None:
        """The pass is over; if it used anything, the next of its kind is expected to be as it."""
        if self._kind is not None and self._seen:
            self._known.pop(self._kind, None)
            self._known[self._kind] = self._seen
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        self._kind, self._seen, self._next = None, [], 0

    def abandon(self) -> None:
        """The pass broke off: what it did is no example, and the last one stays."""
        self._seen = []
        self.end()

    def last(self) -> list[int]:
        """Return the order of the pass that ended last; empty if none has."""
        return list(next(reversed(self._known.values()), ()))

    def used(self, unit: int) -> None:
        """A unit is used now."""
        self._seen.append(unit)
        plan = self._plan()
        for place in (*range(self._next, len(plan)), *range(self._next)):
            if plan[place] == unit:
                self._next = place + 1
                return

    def expected(self) -> Iterator[int]:
        """Yield the units that are expected from now on, to the end of the pass."""
        yield from self._plan()[self._next :]

    def _plan(self) -> list[int]:
        known = self._known.get(self._kind) if self._kind is not None else None
        if known is not None:
            return known
        return self._guess if self._kind != "backward" else self._guess[::-1]
