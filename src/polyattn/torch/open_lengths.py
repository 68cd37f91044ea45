"""Numbers for the batch and the lengths that a model of a traced call leaves open.

A choice is that of a class of sizes (`polyattn.torch.size_classes`). Compiled code has to guard for
which sizes it counts, and where it grows out of them, it is compiled again: so neighbouring classes
with the same choice are one, and a cache of keys that grows, or a batch that changes, is compiled
as often as the choice changes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from polyattn.errors import PolyattnError, Unsupported
from polyattn.selection import Accepted, Selection
from polyattn.selection.prepare import select_here
from polyattn.selection.registry import registry
from polyattn.torch.call_model import ARRAY, ROWS, B, S, T

__all__ = ["Limits", "limits_of", "with_numbers"]

_LAST = 24
"""The last power of two that sizes are tried at; beyond it nothing is chosen otherwise."""

Bounds = tuple[
    int, int, int, int
]  # the classes of B and T, T 0 where it is S; the order of T and S; the class of S
Point = tuple[int, int, int]  # exponents of the classes of B, T and S
Limits = tuple[tuple[str, ...] | None, tuple[tuple[int, int], ...], Bounds]


def limits_of(
    model: Any,
    here: Bounds,
    is_open: tuple[bool, bool, bool],
    ends: tuple[tuple[int, int], ...] | None,
    described: Callable[[Any], Any],
) -> Limits:
    """Return the backends that may be chosen, None for all, for which sizes that counts, and where.

    The second: of B, T and S, and of their product where that matters, above which and up to which
    size, 0 for no limit. Where only one size is open, the choice is that of each size's class;
    where several are, that of a class near by. The last: the classes to prepare a kernel at, of
    the least lengths, since what runs few keys runs many, and not the other way round.

    `ends`: the classes of the least and the largest of each size where none may be guarded; then no
    limit is given, but a choice that counts for all. ``described(model)``: the problem and the
    wishes of a model of numbers.
    """
    choices = _Choices(model, here[2], described)
    at = (_exponent(here[0]), _exponent(here[1] or here[3]), _exponent(here[3]))
    if ends is not None:
        spans = tuple(
            tuple(map(_exponent, end)) if open_ else (e, e)
            for end, open_, e in zip(ends, is_open, at, strict=True)
        )
        if name := choices.name_for(at, spans):
            _, (t, _), (s, _) = spans
            return choices.only(name, (at[0], t, s), None), (), choices.bounds((at[0], t, s))
    region = _Region(choices, at, is_open)
    ranges, least = region.limits(), region.least()
    chosen = choices.at(at)
    name = chosen.backend if isinstance(chosen, Selection) else ""
    return choices.only(name, least, choices.shared(at)), ranges, choices.bounds(least)


def _exponent(size: int) -> int:
    return max(size - 1, 0).bit_length()


class _Choices:
    """What is chosen at classes of sizes; each is asked for once."""

    def __init__(self, model: Any, order: int, described: Callable[[Any], Any]) -> None:
        self._model, self._described = model, described
        self.order = order
        self._known: dict[Point, Any] = {}

    def at(self, point: Point) -> Selection | PolyattnError | None:
        """Return the selection or its error; None where no numbers tell the sizes apart."""
        if point not in self._known:
            model = self._model_at(point)
            self._known[point] = None if model is None else self._selected(model)
        return self._known[point]  # type: ignore[no-any-return]

    def _model_at(self, point: Point) -> Any:
        return with_numbers(self._model, self.bounds(point))

    def _selected(self, model: Any, among: frozenset[str] | None = None) -> Any:
        try:
            problem, wishes = self._described(model)
            return select_here(problem, wishes if among is None else replace(wishes, layer=among))
        except PolyattnError as error:  # of which the call itself will tell
            return error

    def shared(self, point: Point) -> Any:
        """Return what is chosen, as far as sizes may share it; None if they may not."""
        found = self.at(point)
        if not isinstance(found, Selection):
            return None if found is None else type(found)
        if not _takes_any_lengths(found.backend):
            return None
        config = json.dumps(found.config, sort_keys=True, default=repr)
        return found.backend, config, found.fallback

    def accepted(self, point: Point) -> frozenset[str]:
        """Return what can run at a point, and at any lengths."""
        found = self.at(point)
        known = isinstance(found, (Selection, Unsupported))
        decisions = found.decisions if known else {}  # type: ignore[union-attr]
        return frozenset(
            name
            for name, decision in decisions.items()
            if isinstance(decision, Accepted) and _takes_any_lengths(name)
        )

    def name_for(self, at: Point, spans: Any) -> str:
        """Return which backend to choose for all sizes of the spans; none if there is none.

        Nor where one was asked for that does not run them all.
        """
        chosen = self.at(at)
        able = self.accepted(at).intersection(*map(self.accepted, itertools.product(*spans)))
        if not isinstance(chosen, Selection) or chosen.backend in able:
            return chosen.backend if isinstance(chosen, Selection) else ""
        if chosen.source.is_request or not able:
            return ""
        other = self._selected(self._model_at(at), able)
        return other.backend if isinstance(other, Selection) else ""

    def only(self, name: str, point: Point, wanted: Any) -> tuple[str, ...] | None:
        """Return what may be chosen at a point for the choice to be this; None: anything."""
        if not name or (wanted is not None and self.shared(point) == wanted):
            return None
        found = self.at(point)
        return None if isinstance(found, Selection) and found.backend == name else (name,)

    def bounds(self, point: Point) -> Bounds:
        """Return a point as the classes of a model's sizes."""
        b, t, s = (1 << exponent for exponent in point)
        return b, t if self.order else 0, self.order, s


def _takes_any_lengths(name: str) -> bool:
    return registry["torch", name].any_lengths


class _Region:
    """The sizes around those of a call for which the same is chosen.

    From the call's class each open size is followed up and down until the choice changes. Most
    rules ask for the work of a call, B * T * S: where less of another size undoes a change, it is
    the product that is limited, since the sizes grow in any order.
    """

    def __init__(self, choices: _Choices, at: Point, is_open: tuple[bool, bool, bool]) -> None:
        self._choices, self._at = choices, at
        # queries that are as many as keys are followed with them
        self._tied = choices.order == 0
        self._axes = [i for i in range(3) if is_open[i] and not (self._tied and i == 1)]
        self._low, self._high = list(at), list(at)
        self._work: list[int] = [0, 0]

    def limits(self) -> tuple[tuple[int, int], ...]:
        if (wanted := self._choices.shared(self._at)) is None:
            low, high = self._at, self._at
        else:
            for axis in self._axes:
                self._high[axis] = self._followed(axis, 1, wanted)
                self._low[axis] = self._followed(axis, -1, wanted)
            self._shrink()
            low, high = tuple(self._low), tuple(self._high)  # type: ignore[assignment]
        ranges = [(0, 0)] * 3
        for axis in self._axes:
            above = 1 << (low[axis] - 1) if low[axis] > 0 else 0
            ranges[axis] = (above, 0 if high[axis] == _LAST else 1 << high[axis])
        return (*ranges, (self._work[0], self._work[1])) if any(self._work) else tuple(ranges)

    def least(self) -> Point:
        """Return the point of the call's batch and of the least lengths."""
        if self._tied:
            return self._at[0], self._low[2], self._low[2]
        return self._at[0], self._low[1], self._low[2]

    def _moved(self, point: Point, axis: int, by: int) -> Point:
        moved = list(point)
        moved[axis] += by
        if self._tied and axis == 2:
            moved[1] += by
        return moved[0], moved[1], moved[2]

    def _followed(self, axis: int, step: int, wanted: Any) -> int:
        """Return the last exponent of a size with the choice; the product's limit may be the end.

        One, which kernels know, is no neighbour of other sizes.
        """
        last, end = self._at, _LAST if step > 0 else 1
        while (last[axis] - end) * step < 0:
            following = self._moved(last, axis, step)
            if self._choices.shared(following) != wanted:
                if not self._is_by_work(following, axis, step, wanted):
                    return last[axis]
                self._limit_work(last, step)
                return end
            last = following
        return last[axis]

    def _is_by_work(self, changed: Point, axis: int, step: int, wanted: Any) -> bool:
        for other in self._axes:
            if other != axis:
                undone = self._moved(changed, other, -step)
                if self._tied and axis == 2:  # which counts twice
                    undone = self._moved(undone, other, -step)
                if min(undone) >= 0 and self._choices.shared(undone) == wanted:
                    return True
        return False

    def _limit_work(self, last: Point, step: int) -> None:
        """Limit the product to that of the last class: its largest upwards, its least downwards."""
        if step > 0:
            most = 1 << sum(last)
            self._work[1] = min(self._work[1] or most, most)
        else:
            least = 1 << sum(max(exponent - 1, 0) for exponent in last)
            self._work[0] = max(self._work[0], least)

    def _shrink(self) -> None:
        """Draw the ends in to where the chosen backend runs, whatever the other sizes are."""
        chosen = self._choices.at(self._at)
        if not isinstance(chosen, Selection):
            return
        while (corner := self._refused(chosen.backend)) is not None:
            far = max(self._axes, key=lambda axis: abs(corner[axis] - self._at[axis]))
            if corner[far] > self._at[far]:
                self._high[far] -= 1
            elif corner[far] < self._at[far]:
                self._low[far] += 1
            else:
                return

    def _refused(self, name: str) -> Point | None:
        for ends in itertools.product((0, 1), repeat=len(self._axes)):
            corner = self._at
            for axis, end in zip(self._axes, ends, strict=True):
                to = (self._low, self._high)[end][axis]
                corner = self._moved(corner, axis, to - self._at[axis])
            if name not in self._choices.accepted(corner):
                return corner
        return None


def with_numbers(model: Any, bounds: Bounds) -> Any:
    """Return a model with numbers for its names, or None where none tell the sizes apart."""
    taken = {size for size in _sizes(model) if isinstance(size, int)}
    for_b, for_t, order, s = bounds
    keys = _pick(s, taken)
    queries: int | None = keys
    if order:
        queries = _pick(for_t, taken)
    while order < 0 and keys is not None and queries is not None and keys <= queries:
        s *= 2
        keys = _pick(s, taken)
    while order > 0 and keys is not None and queries is not None and queries <= keys:
        for_t *= 2
        queries = _pick(for_t, taken)
    if keys is None or queries is None:
        return None
    batch = _pick(for_b, taken | {keys, queries})
    return None if batch is None else _filled(model, {B: batch, T: queries, S: keys})


def _pick(bound: int, taken: set[int]) -> int | None:
    """Return a size up to a power of two, and above the one before, that no other size has."""
    if bound <= 2:  # a class of one
        return bound
    return next((size for size in range(bound, bound // 2, -1) if size not in taken), None)


def _sizes(model: Any) -> Iterator[Any]:
    if isinstance(model, tuple):
        if model and model[0] == ARRAY:
            yield from model[1]
        else:
            for part in model:
                yield from _sizes(part)


def _filled(model: Any, numbers: dict[str, int]) -> Any:
    if not isinstance(model, tuple):
        return model
    if model and model[0] == ARRAY:
        return (ARRAY, tuple(_number(size, numbers) for size in model[1]), *model[2:])
    return tuple(_filled(part, numbers) for part in model)


def _number(size: Any, numbers: dict[str, int]) -> int:
    if isinstance(size, tuple):
        name, other = size
        return -(-numbers[T] // other) if name == ROWS else numbers[name] + other
    return numbers[size] if isinstance(size, str) else size
