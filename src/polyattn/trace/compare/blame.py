"""Blame: the first thing that deviates, in the order in which the port ran, and whose doing it is.

An output that deviates while the inputs agree is its module's doing, and of modules inside each
other the innermost deviates first. An input that deviates while all before it agrees is the doing
of the code around: of the parent, between the child that returned last and this one. What deviates
later is inherited. Gradients are walked alike, in the order of the backward pass.

In an isolated run nothing is inherited from where the reference's tensors were fed, so each further
deviation there is somebody's own doing as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from polyattn.trace.compare.called import Called, Event
from polyattn.trace.compare.changes_in_place import Changes
from polyattn.trace.compare.choices import Choices
from polyattn.trace.compare.differences_of_form import Form
from polyattn.trace.compare.drift import fed
from polyattn.trace.compare.frames import Frame, ancestors, changed_in_place
from polyattn.trace.compare.judge import coarse
from polyattn.trace.compare.not_handed_on import withheld
from polyattn.trace.compare.side import Side
from polyattn.trace.compare.thresholds import JUMP
from polyattn.trace.compare.verdict import Culprit
from polyattn.trace.format.record import Record

__all__ = ["Walk"]

_GREY_JUMP = 6.0
_GROWN = 64.0


@dataclass
class Walk:
    """Walks the events of two runs. `culprit` after :meth:`run`: whose doing the first difference
    is, or None; `start`: the event where even the first inputs differ. `outputs_only`: the inputs
    are recorded as they were fed. `further`: in an isolated run, whose doing else is one;
    `unlike`: inputs of the run that differ and had the reference's put in their place.
    """

    a: Side
    b: Side
    calls: Sequence[Called]
    outputs_only: bool = False
    culprit: Culprit | None = None
    blamed: Event | None = None
    start: Event | None = None
    healed: list[Event] = field(default_factory=list)
    further: list[Culprit] = field(default_factory=list)
    unlike: list[Event] = field(default_factory=list)
    choices: Choices = field(default_factory=Choices)

    def run(self) -> None:
        """Give each event its status, up to the first that differs; after it, what is inherited."""
        events = [event for call in self.calls for event in call.events()]
        events.sort(key=lambda event: event.at)
        self._of = {call.b: call for call in self.calls}
        self._matched = {call.b.module for call in self.calls}
        self._scope: dict[Frame | None, float] = {}
        self._last: dict[Frame | None, Event] = {}
        self._agreed: set[tuple[object, ...]] = set()
        self._largest, self._any_out = 0.0, False
        self._form = Form(self.calls, self._of, self.a.trace.records)
        self._around = self._form.around
        self._changes = Changes(self.calls, self.b.frames)
        for event in events:
            done = self.blamed is not None or self.start is not None
            if done and (event.drift != 0 or self.start is not None):
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
        if worst is None or (self.outputs_only and not event.out):
            return "none"
        if worst.ratio <= 1:
            return "same"
        if any(one.b.form for one in event.tensors):
            self.healed.append(event)
            return "none"
        error, limit = worst.distance.error, worst.limit
        if event.drift == 0 and _fed(event):
            return "cannot say" if limit.noise and error <= limit.grey else self._sharp(event)
        usual = _GREY_JUMP * self._largest
        if event.drift != 0 and self.choices.behind(
            event, self._source(event), usual, self._agreed
        ):
            return "cannot say"
        if math.isfinite(error) and limit.how in ("fallback", "calibrated") and event.drift != 0:
            if coarse(worst) and limit.how == "fallback":
                if error <= limit.grey or error < usual:
                    return "cannot say"
            elif error <= min(JUMP * self._source(event), _GROWN * limit.value):
                return "grown"
        if (event.drift is None or self.outputs_only) and self._form.only(event):
            self.healed.append(event)
            return "none"
        return "differs"

    @property
    def unfed_inside(self) -> str | None:
        """The reference's name of the culprit, where calls inside it were not fed."""
        scope = self.blamed.call if self.blamed is not None else None
        if scope is None or self.culprit is None or self.culprit.kind != "output":
            return None
        inside = (call for call in self.calls if call.b.within(scope.b))
        unfed = any(not _fed(event) for call in inside for event in call.events())
        return self.culprit.reference_module if unfed else None

    def _sharp(self, event: Event) -> str:
        """What is to be said of a difference in an isolated run that has nothing but its module's
        own doing in it, and goes no further.
        """
        frame = event.call.b
        if event.out or self._any_out or self._blamed_scope(frame) is not None:
            return "differs"
        self.unlike.append(event)
        self._scope[frame] = 0.0
        return "none"

    def _source(self, event: Event) -> float:
        """The largest error among what this event was computed from, as far as calls tell."""
        frame = event.call.b
        return self._scope.get(frame if event.out else self._around(frame), 0.0)

    def _passed(self, event: Event) -> None:
        error, frame = event.error or 0.0, event.call.b
        if _fed(event):
            error = 0.0
        around = self._around(frame)
        scope = around if event.out else frame
        self._scope[scope] = max(self._scope.get(scope, 0.0), error)
        self._largest = max(self._largest, error)
        self._agreed.update(t.b.identity for t in event.tensors if t.ratio <= 1)
        if event.out:
            self._last[around] = event
            self._any_out = True

    def _differs(self, event: Event) -> None:
        frame = event.call.b
        scope = frame if event.out else self._blamed_scope(frame)
        if scope is None and not self._any_out:
            self.start = event
            return
        culprit = self._culprit(event, scope)
        if self.blamed is None:
            self.blamed, self.culprit = event, culprit
        else:
            self.further.append(culprit)
        if _fed(event):
            self._scope.setdefault(self._around(frame) if event.out else frame, 0.0)
            self._any_out |= event.out

    def _culprit(self, event: Event, scope: Frame | None) -> Culprit:
        worst, frame = event.worst, event.call.b
        assert worst is not None
        module, kind = frame.module, "output"
        reference: str | None = event.call.match.a.name
        if not event.out:
            kind = "input"
            module, reference = self._around_name(frame, scope)
        after = self._last.get(scope)
        between = self._between(after, event, scope)
        alone = self._producer(worst.b, between)
        if alone is not None:
            module, reference, kind = alone.module, None, "output"
        kept = withheld(scope, self._of, self._around) if scope is not None else None
        if kept is not None:
            return self._kept(event, *kept)
        changed = self._changes.behind(event)
        if changed is not None:
            return self._changed(event, *changed)
        return Culprit(
            module=module, reference_module=reference, kind=kind, phase=worst.b.phase,
            step=frame.step, call=self._call(scope, frame), at=frame.module, tensor=worst.b.tensor,
            after=after.call.b.module if after is not None else None,
            between=tuple(dict.fromkeys(one.module for one in between)),
            lacking=self._lacking(after, event), error=worst.distance.error,
            threshold=worst.limit.value, evidence="; ".join(filter(None, (
                _said(event), self._changes.said(event),
            ))),
        )  # fmt: skip

    def _kept(self, event: Event, call: Called, child: Frame, lacking: Record) -> Culprit:
        """Whose doing it is that a call lacks what the call around it was given."""
        worst = event.worst
        assert worst is not None
        return Culprit(
            module=call.b.module, reference_module=call.a.module, kind="input", phase="in",
            step=call.b.step, call=call.b.call, at=child.module, tensor=lacking.tensor,
            error=worst.distance.error, threshold=worst.limit.value,
            evidence=f"it is not handed on, and {event.call.b.module!r} is off without it",
        )  # fmt: skip

    def _changed(self, event: Event, by: Frame, reference: str | None, argument: str) -> Culprit:
        """Whose doing it is that a tensor is no longer what it was."""
        worst = event.worst
        assert worst is not None
        return Culprit(
            module=by.module, reference_module=reference, kind="output", phase="out",
            step=by.step, call=by.call, at=event.call.b.module, tensor=argument,
            error=worst.distance.error, threshold=worst.limit.value,
            evidence=f"what {event.call.b.module or 'the model'!r} is given is that argument, "
                     "changed in place on one side only",
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
            given = {record.identity for record in at.ins}
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
            one
            for one in self.b.frames
            if since < one.last <= event.at
            and one is not event.call.b
            and (scope is None or one.within(scope))
            and (one not in self._of or not self._of[one].outs.compared)
        ]

    def _lacking(self, after: Event | None, event: Event) -> tuple[str, ...]:
        """Modules of the reference without a counterpart that ran meanwhile."""
        known = {call.a for call in self.calls}
        since = after.call.a.last if after is not None else event.call.a.first
        until = event.call.a.last if event.out else event.call.a.first
        found = (f.module for f in self.a.frames if since < f.last <= until and f not in known)
        return tuple(dict.fromkeys(found))

    def _producer(self, record: Record, between: Sequence[Frame]) -> Frame | None:
        """The call without a counterpart that made the tensor from inputs that all agree."""
        own = record.identity
        for one in between:
            if one.module in self._matched:
                continue  # its own calls agree; that it is called once more is its caller's doing
            made = any(out.identity == own for out in one.outs)
            passed = any(r.identity == own for r in one.ins)
            if made and not passed and one.ins and all(r.identity in self._agreed for r in one.ins):
                return one
        return None


def _fed(event: Event) -> bool:
    """Whether what follows was computed from the reference's tensors instead of these."""
    if event.drift is None:
        return False
    records = [one.b for one in event.tensors]
    returned = [record for record in records if not changed_in_place(record)]
    return fed(returned or records)


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
