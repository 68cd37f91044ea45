"""Blame: the first thing that deviates, in the order in which the port ran, and whose doing it is.

An output that deviates while the inputs agree is its module's doing, and of modules inside each
other the innermost deviates first. An input that deviates while all before it agrees is the doing
of the code around: of the parent, between the child that returned last and this one. What deviates
later is inherited. Gradients are walked alike, in the order of the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from polyattn.trace.compare.form import Form
from polyattn.trace.compare.frames import Frame, ancestors
from polyattn.trace.compare.judge import Called, Event, coarse
from polyattn.trace.compare.side import Side
from polyattn.trace.compare.thresholds import JUMP
from polyattn.trace.compare.verdict import Culprit
from polyattn.trace.record import Record

__all__ = ["Walk"]

_GREY_JUMP = 6.0
_GROWN = 64.0


@dataclass
class Walk:
    """Walks the events of two runs. `culprit` after :meth:`run`: whose doing the first difference
    is, or None; `start`: the event where even the first inputs differ.
    """

    a: Side
    b: Side
    calls: Sequence[Called]
    isolated: bool = False
    culprit: Culprit | None = None
    blamed: Event | None = None
    start: Event | None = None
    healed: list[Event] = field(default_factory=list)

    def run(self) -> None:
        """Give each event its status, up to the first that differs; after it, what is inherited."""
        events = [event for call in self.calls for event in call.events()]
        events.sort(key=lambda event: event.at)
        self._of = {call.b: call for call in self.calls}
        self._scope: dict[Frame | None, float] = {}
        self._last: dict[Frame | None, Event] = {}
        self._agreed: set[tuple[object, ...]] = set()
        self._largest, self._any_out = 0.0, False
        self._form = Form(self.calls, self._of, self.a.trace.records)
        self._around = self._form.around
        for event in events:
            if self.blamed is not None or self.start is not None:
                if event.compared:
                    event.status = "same" if event.agrees else "inherited"
                continue
            event.status = self._status(event)
            if event.status == "differs":
                self._differs(event)
            elif event.status != "none":
                self._passed(event)

    def _status(self, event: Event) -> str:
        worst = event.worst
        if worst is None or (self.isolated and not event.out):
            return "none"
        if worst.ratio <= 1:
            return "same"
        error, limit = worst.distance.error, worst.limit
        if math.isfinite(error) and limit.how in ("fallback", "calibrated"):
            if coarse(worst) and limit.how == "fallback" and not self.isolated:
                if error <= limit.grey or error < _GREY_JUMP * self._largest:
                    return "cannot say"
            elif error <= min(JUMP * self._source(event), _GROWN * limit.value):
                return "grown"
        if self._form.only(event):
            self.healed.append(event)
            return "none"
        return "differs"

    def _source(self, event: Event) -> float:
        """The largest error among what this event was computed from, as far as calls tell."""
        frame = event.call.b
        return self._scope.get(frame if event.out else self._around(frame), 0.0)

    def _passed(self, event: Event) -> None:
        error, frame = event.error or 0.0, event.call.b
        around = self._around(frame)
        scope = around if event.out else frame
        self._scope[scope] = max(self._scope.get(scope, 0.0), error)
        self._largest = max(self._largest, error)
        self._agreed.update(_identity(t.b) for t in event.tensors if t.ratio <= 1)
        if event.out:
            self._last[around] = event
            self._any_out = True

    def _differs(self, event: Event) -> None:
        worst = event.worst
        assert worst is not None
        frame = event.call.b
        if event.out:
            scope: Frame | None = frame
            module, kind = frame.module, "output"
            reference: str | None = event.call.match.a.name
        else:
            scope = self._blamed_scope(frame)
            if scope is None and not self._any_out:
                self.start = event
                return
            kind = "input"
            module, reference = self._around_name(frame, scope)
        self.blamed = event
        after = self._last.get(scope)
        between = self._between(after, event, scope)
        alone = self._producer(worst.b, between)
        if alone is not None:
            module, reference, kind = alone.module, None, "output"
        self.culprit = Culprit(
            module=module, reference_module=reference, kind=kind, phase=worst.b.phase,
            step=frame.step, call=self._call(scope, frame), at=frame.module, tensor=worst.b.tensor,
            after=after.call.b.module if after is not None else None,
            between=tuple(dict.fromkeys(one.module for one in between)),
            lacking=self._lacking(after, event), error=worst.distance.error,
            threshold=worst.limit.value, evidence=_said(event),
        )  # fmt: skip

    def _blamed_scope(self, frame: Frame) -> Frame | None:
        """The innermost call around whose own inputs, or something inside, is known to agree."""
        at = self._around(frame)
        while at is not None and at not in self._scope:
            at = self._around(at)
        return at

    def _around_name(self, frame: Frame, scope: Frame | None) -> tuple[str, str | None]:
        at = frame.parent
        while at is not None and at is not scope and at not in self._of:
            given = {_identity(record) for record in at.ins}
            if given and given <= self._agreed:
                return at.module, None  # without a counterpart, but what it was given is right
            at = at.parent
        if scope is not None:
            return scope.module, self._of[scope].match.a.name
        name = next((one for one in ancestors(frame.module) if one in self.b.modules), "")
        names = {call.b.module: call.match.a.name for call in self.calls}
        return name, names.get(name)

    def _call(self, scope: Frame | None, frame: Frame) -> int:
        return frame.call if scope is None else scope.call

    def _between(self, after: Event | None, event: Event, scope: Frame | None) -> list[Frame]:
        """Calls of the port that were not compared, since the last that agreed."""
        since = after.at if after is not None else -math.inf
        return [
            one for one in self.b.frames
            if since < one.last <= event.at and one is not event.call.b
            and (scope is None or one.within(scope))
            and (one not in self._of or not self._of[one].outs.compared)
        ]  # fmt: skip

    def _lacking(self, after: Event | None, event: Event) -> tuple[str, ...]:
        """Modules of the reference without a counterpart that ran meanwhile."""
        known = {call.a for call in self.calls}
        since = after.call.a.last if after is not None else event.call.a.first
        until = event.call.a.last if event.out else event.call.a.first
        found = (f.module for f in self.a.frames if since < f.last <= until and f not in known)
        return tuple(dict.fromkeys(found))

    def _producer(self, record: Record, between: Sequence[Frame]) -> Frame | None:
        """The call without a counterpart that made the tensor from inputs that all agree."""
        own = _identity(record)
        for one in between:
            made = any(_identity(out) == own for out in one.outs)
            passed = any(_identity(r) == own for r in one.ins)
            if (
                made
                and not passed
                and one.ins
                and all(_identity(r) in self._agreed for r in one.ins)
            ):
                return one
        return None


def _identity(record: Record) -> tuple[object, ...]:
    return record.n, record.sketch, record.min, record.max, record.l2


def _said(event: Event) -> str:
    worst = event.worst
    assert worst is not None
    found = worst.distance
    parts = [found.evidence] if found.evidence else []
    if found.order:
        parts.append("the same values in another order")
    elif found.scale > 0.95 and math.isfinite(found.error):
        parts.append("mostly one common factor")
    if event.out and not event.call.ins.compared:
        parts.append("its inputs were not recorded")
    return "; ".join(parts)
