"""Drift: in a run whose modules were fed the reference's tensors, how old each value's errors are.

What a module computes from the reference's own tensors has no inherited error: its drift is 0. A
call that was not fed (it has no counterpart, or its tensors were not kept whole) computes from what
its surroundings have, and everything on the way that was not replaced adds its rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from polyattn.trace.compare.distance import floating
from polyattn.trace.compare.frames import Frame
from polyattn.trace.format.record import Record

__all__ = ["drifts", "fed"]

Drifts = dict[tuple[Frame, bool], int]


def drifts(frames: Sequence[Frame], reference: Iterable[Record]) -> Drifts:
    """Return, for the inputs (False) and outputs (True) of each call of the port, how many calls
    that were not fed with the reference's tensors went into them.

    `reference`: its records. What is one of its tensors to the bit is as good as fed: a wrapper
    hands on what something inside it was fed.
    """
    known = {record.identity for record in reference if record.sketch is not None}
    events = [(frame.first, False, frame) for frame in frames]
    events += [(frame.last, True, frame) for frame in frames]
    events.sort(key=lambda event: event[:2])
    found: Drifts = {}
    scope: dict[Frame | None, int] = {}
    for _, out, frame in events:
        around = scope.get(frame.parent, 0)
        if not out:
            found[frame, False] = around
            scope[frame] = 0 if fed(frame.ins, known) else around + 1
            continue
        found[frame, True] = own = scope.get(frame, 0)
        if not fed(frame.outs or frame.changed, known):
            scope[frame.parent] = max(around, own + 1)
    return found


def fed(records: Sequence[Record], known: Collection[tuple[object, ...]] = ()) -> bool:
    """Whether the reference's tensors took the place of all of these that are rounded; of all,
    where none is. `known`: identities of tensors that count as fed.
    """
    rounded = [record for record in records if floating(record.dtype)] or records
    return bool(rounded) and all(r.forced or (known and r.identity in known) for r in rounded)
