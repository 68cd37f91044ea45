"""Rows: the table of a verdict, one line a call, in the order in which the port ran."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

from polyattn.trace.compare.called import Called, Event
from polyattn.trace.compare.drift import fed
from polyattn.trace.compare.frames import Frame
from polyattn.trace.compare.side import Side
from polyattn.trace.compare.verdict import Culprit, Row

__all__ = ["rows"]


def rows(
    a: Side,
    b: Side,
    calls: Sequence[Called],
    culprit: Culprit | None,
    blamed: Event | None,
    further: Collection[tuple[str, int | None]] = (),
) -> tuple[Row, ...]:
    """Return a row for each call with a counterpart, and for the first of each without one.

    `further`: modules and calls that differ by themselves, besides the culprit.
    """
    found: list[tuple[float, float, Row]] = []
    for call in calls:
        found.append((call.b.first, -call.b.last, _row(call, culprit, blamed, further)))
    known = {call.a for call in calls} | {call.b for call in calls}
    for frame in _first_of_each(b.frames, known, {c.b.module for c in calls}):
        at_fault = culprit is not None and culprit.module == frame.module
        found.append((frame.first, -frame.last, _alone(frame, "extra", at_fault)))
    in_order = sorted(calls, key=lambda call: call.a.first)
    starts = [call.a.first for call in in_order]
    for frame in _first_of_each(a.frames, known, {c.a.module for c in calls}):
        at = bisect_right(starts, frame.first) - 1
        place = in_order[at].b.first if at >= 0 else -1.0
        found.append((place, 1.0 + frame.first, _alone(frame, "missing", False)))
    found.sort(key=lambda one: one[:2])
    return tuple(row for _, _, row in found)


def _first_of_each(frames: Sequence[Frame], known: set[Frame], seen: set[str]) -> list[Frame]:
    """The first call of each module that has no counterpart, and calls beyond the counterpart's."""
    found: dict[str, Frame] = {}
    for frame in frames:
        if frame not in known:
            found.setdefault(frame.module, frame)
    return list(found.values())


def _alone(frame: Frame, verdict: str, at_fault: bool) -> Row:
    extra = verdict == "extra"
    return Row(
        module=frame.module if extra else None,
        reference_module=None if extra else frame.module,
        cls=frame.cls,
        phase=frame.phase,
        step=frame.step,
        call=frame.call,
        depth=frame.depth,
        verdict="culprit" if at_fault else verdict,
    )


def _row(
    call: Called,
    culprit: Culprit | None,
    blamed: Event | None,
    further: Collection[tuple[str, int | None]],
) -> Row:
    before, after = call.ins.error, call.outs.error
    worst = max(
        (one for one in (call.ins.worst, call.outs.worst) if one is not None),
        key=lambda one: one.ratio,
        default=None,
    )
    both = before is not None and after is not None
    # what a call was given counts for nothing where the reference's took its place
    inherited = 0.0 if both and fed([t.b for t in call.ins.tensors]) else before
    return Row(
        module=call.b.module, reference_module=call.a.module, cls=call.b.cls,
        phase=call.b.phase, step=call.b.step, call=call.b.call, depth=call.b.depth,
        error_in=before, error_out=after, inherited=inherited,
        contributed=_more(after, inherited) if both else after,
        threshold=None if worst is None else worst.limit.value,
        verdict=_verdict(call, culprit, blamed, further), how=call.match.how, note=_note(call),
    )  # fmt: skip


def _more(after: float | None, before: float | None) -> float:
    if after is None or before is None or after <= before:
        return 0.0
    return after - before


def _verdict(
    call: Called,
    culprit: Culprit | None,
    blamed: Event | None,
    further: Collection[tuple[str, int | None]],
) -> str:
    if culprit is not None and _is(call, culprit, blamed):
        return "culprit"
    if (call.b.module, call.b.call) in further:
        return "differs"
    # what it was given is the doing of the code around, and it ran on the reference's
    events = [event for event in call.events() if event.out or event.drift is None]
    statuses = {event.status for event in events or call.events()}
    for status in ("differs", "inherited", "cannot say"):
        if status in statuses:
            return "inherited" if status == "differs" else status
    return "same" if statuses & {"same", "grown"} else "not compared"


def _is(call: Called, culprit: Culprit, blamed: Event | None) -> bool:
    """Whether the culprit is this call: the blamed one, or the one around it."""
    if call.b.module != culprit.module:
        return False
    if blamed is None:
        return True
    return call.b is blamed.call.b or blamed.call.b.within(call.b)


def _note(call: Called) -> str:
    for event in call.events():
        if event.status == "none" or not event.compared:
            lacking = next((t.distance.why for t in event.tensors if t.distance.why), "")
            if lacking:
                return lacking
            if event.compared and not event.agrees:
                return "differs in form only: what follows agrees"
        if event.status == "differs" and not event.out and fed([t.b for t in event.tensors]):
            return "was given something else, and fed the reference's"
        if event.status == "grown":
            return "above the threshold by what it inherits"
    if (call.a.outs or call.b.outs) and not call.outs.tensors:
        return "what it returns was not compared"
    return ""
