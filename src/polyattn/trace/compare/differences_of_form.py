"""Form: differences that are no fault, because the pair does not mean quite the same piece.

A port's attention may hold the residual, its first linear layer the activation, its block hand on a
pair. What such a module takes or gives differs grossly, and everything after it agrees.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set

from polyattn.trace.compare.called import Called, Event
from polyattn.trace.compare.distance import distance
from polyattn.trace.compare.frames import Frame, changed_in_place
from polyattn.trace.compare.judge import coarse
from polyattn.trace.format.record import Record

__all__ = ["Form"]

_HEALED = 1e-3
_ROUNDINGS = 4.0
_TRIED, _NEAR = 8, 256


class Form:
    """Says which events differ in form only. `calls`: all that have a counterpart.

    Asked only of pairs whose classes differ, and of outputs that are not the first of their module:
    a difference between surely the same things is a fault, whatever comes after it.
    """

    def __init__(
        self, calls: Sequence[Called], of: Mapping[Frame, Called], reference: Sequence[Record]
    ) -> None:
        self._of, self._records = of, reference
        self._tops = {call.b: _top(call.b) for call in calls}
        self._calls = calls
        self._witnesses = {
            call
            for call in calls
            if call.match.firm and _within(call.outs) and (_within(call.ins) or not call.b.ins)
        }
        self._next = _next_calls(calls)
        self._first = _first_seen(calls)
        self._wrong = {  # what surely the same modules were given, and it was not the same
            one.b.identity
            for call in calls
            if call.match.firm
            for one in call.ins.tensors
            if one.main and one.distance.comparable and one.ratio > 1
        }
        self._known: set[tuple[object, ...]] = set()
        tried: dict[tuple[object, ...], int] = {}
        for call in calls:
            for event in call.events():
                key = _key(event)
                if self.may_be(event) and key not in self._known and tried.get(key, 0) < _TRIED:
                    tried[key] = tried.get(key, 0) + 1
                    if self._heals(event):
                        self._known.add(key)

    def may_be(self, event: Event) -> bool:
        """Whether a difference here could be one of form."""
        worst = event.worst
        if worst is None or worst.ratio <= 1:
            return False
        if not event.call.match.firm:
            return True
        # an argument that both change in place is surely the same thing
        return event.out and not _main_differs(event) and not changed_in_place(worst.b)

    def only(self, event: Event) -> bool:
        """Whether it is: here, or in the same classes elsewhere, later modules agree all the same;
        or what the first module inside is given agrees.
        """
        if not self.may_be(event):
            return False
        if _key(event) in self._known or self._heals(event):
            return True
        return self._inside_agrees(event) or self._comes_later(event)

    def _heals(self, event: Event) -> bool:
        worst, call = event.worst, event.call
        assert worst is not None
        error = worst.distance.error
        if event.out and worst.b.identity in self._wrong:
            return False
        around = self.around(call.b)
        if around is not None and _clean(self._of[around].outs, error):
            return True
        firm = around is not None and self._of[around].match.firm
        if firm and around is not None and _main_differs(self._of[around].outs):
            return False  # it got out; what agrees elsewhere has nothing to do with it
        until = self._next.get(call.b, math.inf)
        there = {key for key, first in self._first.items() if first <= event.at}
        start = bisect_right(self._calls, event.at, key=lambda one: one.b.first)
        for one in self._calls[start:]:
            if one.b.first >= until:
                break
            if _computed_from(one, there):
                there.update(record.identity for record in (*one.b.outs, *one.b.changed))
                continue
            apart = around is None or not one.b.within(around)
            alike = self._tops[one.b] is self._top_of(call.b, one.b)
            later = one in self._witnesses and not one.b.within(call.b)
            if later and apart and alike and _clean(one.outs, error):
                return True
        return False

    def _comes_later(self, event: Event) -> bool:
        """Whether the output is what the reference has a little later, inside the same parent: its
        sum with the residual, its activation.
        """
        worst, frame = event.worst, event.call.a
        if not event.out or worst is None or not worst.main:
            return False
        until = frame.parent.last if frame.parent is not None else frame.last + _NEAR
        first = bisect_right(self._records, frame.last, key=lambda record: record.seq)
        for record in self._records[first : first + _NEAR]:
            if record.seq > until:
                break
            if record.n == worst.b.n and record.shape == worst.b.shape:
                found = distance(record, worst.b)
                if found.comparable and 0 <= found.error <= worst.limit.value:
                    return True
        return False

    def _top_of(self, frame: Frame, other: Frame) -> Frame:
        """The outermost call of both: `other`'s own where neither is inside another."""
        top = self._tops[frame]
        return self._tops[other] if top is frame and other.step == frame.step else top

    def _inside_agrees(self, event: Event) -> bool:
        worst, frame = event.worst, event.call.b
        if event.out or worst is None or not worst.main:
            return False
        inner = (self._of.get(child) for child in frame.children)
        first = next((call for call in inner if call is not None and call.ins.compared), None)
        return first is not None and _clean(first.ins, worst.distance.error)

    def around(self, frame: Frame) -> Frame | None:
        """The innermost call around one that has a counterpart."""
        at = frame.parent
        while at is not None and at not in self._of:
            at = at.parent
        return at


def _computed_from(call: Called, there: Set[tuple[object, ...]]) -> bool:
    """Whether a call is fed nothing else. The keys of a context, or a branch that runs beside a
    wrong one, are right whatever happened meanwhile: they show nothing.
    """
    return bool(call.b.ins) and all(record.identity in there for record in call.b.ins)


def _first_seen(calls: Sequence[Called]) -> dict[tuple[object, ...], float]:
    """When each tensor of the port was recorded for the first time."""
    found: dict[tuple[object, ...], float] = {}
    for call in calls:
        for record in (*call.b.ins, *call.b.outs, *call.b.changed):
            key = record.identity
            found[key] = min(found.get(key, math.inf), record.seq)
    return found


def _main_differs(event: Event) -> bool:
    return any(one.main and one.distance.comparable and one.ratio > 1 for one in event.tensors)


def _clean(event: Event, error: float) -> bool:
    """Whether nothing of an error is left in a later event but rounding."""
    worst = event.worst
    if worst is None or not _within(event):
        return False
    least = max(_HEALED, _ROUNDINGS * worst.eps if coarse(worst) else 0.0)
    return (event.error or 0.0) <= least * error


def _within(event: Event) -> bool:
    """Whether all that is compared agrees, or in a coarse dtype may agree."""
    known = [one for one in event.tensors if one.distance.comparable]
    return bool(known) and all(o.ratio <= 1 or o.distance.error <= o.limit.grey for o in known)


def _top(frame: Frame) -> Frame:
    while frame.parent is not None:
        frame = frame.parent
    return frame


def _next_calls(calls: Sequence[Called]) -> dict[Frame, float]:
    """When the module of each call runs next."""
    found: dict[Frame, float] = {}
    last: dict[tuple[str, bool], Frame] = {}
    for call in calls:
        key = (call.b.module, call.b.backward)
        if key in last:
            found[last[key]] = call.b.first
        last[key] = call.b
    return found


def _key(event: Event) -> tuple[object, ...]:
    """The same piece of other layers and calls."""
    match, worst = event.call.match, event.worst
    paths = (worst.a.tensor, worst.b.tensor) if worst is not None else ()
    return match.a.cls, match.b.cls, match.a.leaf, match.b.leaf, event.out, paths
