"""Outputs: whether what the models return was compared at all. Without that nothing is the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polyattn.trace.compare.called import Called
from polyattn.trace.compare.side import Side
from polyattn.trace.compare.verdict import Guard
from polyattn.trace.format.record import Record

__all__ = ["output_notes", "outputs"]

_NAMED = 4


def outputs(a: Side, b: Side, calls: Sequence[Called]) -> Guard:
    """Whether something of what the models return was compared in each call of theirs, or neither
    returns anything. None where the models themselves were not recorded.
    """
    found = list(_of_models(calls))
    if not found:
        ours, theirs = _returned(a), _returned(b)
        if not ours or not theirs:
            return Guard("outputs", None, "not recorded of the models themselves")
        return Guard("outputs", False, _said(ours, theirs, "neither is the other's counterpart"))
    for call in found:
        ours, theirs = ([*one.outs, *one.changed] for one in (call.a, call.b))
        if (ours or theirs) and not call.outs.compared:
            known = (one for one in call.outs.tensors if "note" not in one.b.extra)
            why = "; ".join(f"{one.b.tensor}: {one.distance.why}" for one in known)
            return Guard("outputs", False, _said(ours, theirs, why))
    return Guard("outputs", True)


def output_notes(calls: Sequence[Called]) -> Iterator[str]:
    """Yield what of the models' outputs was not compared where some of it was."""
    for call in _of_models(calls):
        if not call.outs.compared:
            continue
        ours = {one.a.tensor for one in call.outs.tensors}
        theirs = {one.b.tensor for one in call.outs.tensors}
        left = [_named(one.b) for one in call.outs.tensors if not one.distance.comparable]
        left += [f"{_named(r)} of the reference" for r in call.a.outs if r.tensor not in ours]
        left += [f"{_named(r)} of the port" for r in call.b.outs if r.tensor not in theirs]
        if left:
            yield f"of what the model returns not compared: {_few(left)}"


def _returned(side: Side) -> list[Record]:
    """What the model itself returned in its first call."""
    frames = (frame for frame in side.frames if not frame.module and not frame.backward)
    return next((frame.outs for frame in frames), [])


def _of_models(calls: Sequence[Called]) -> Iterator[Called]:
    """The forward calls of either model itself."""
    for call in calls:
        if not call.b.backward and "" in (call.match.a.name, call.match.b.name):
            yield call


def _said(a: Sequence[Record], b: Sequence[Record], why: str) -> str:
    names = [_few([_named(one) for one in side]) or "nothing" for side in (a, b)]
    return (
        f"what the model returns could not be compared: {names[0]} in the reference, {names[1]} in "
        f"the port{f' ({why})' if why else ''}; have both return dense tensors under the same names"
    )


def _named(record: Record) -> str:
    note = record.extra.get("note")
    return f"{record.tensor} ({str(note).split(', expected')[0]:.80})" if note else record.tensor


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
