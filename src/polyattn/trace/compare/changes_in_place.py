"""Changes in place: whose doing it is that a tensor is not what it was when it was handed on.

A module that adds into its own input may return the right numbers all the same, and what is wrong
shows far away, wherever the caller uses that tensor again.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from polyattn.trace.compare.called import Called, Event
from polyattn.trace.compare.frames import Frame
from polyattn.trace.format.record import Record

__all__ = ["Changes"]


class Changes:
    """The arguments that calls of one side changed in place and their counterparts did not.

    `calls`: those with a counterpart; `frames`: all of the port's.
    """

    def __init__(self, calls: Sequence[Called], frames: Sequence[Frame]) -> None:
        self._of = {call.b: call for call in calls}
        self._here: dict[tuple[object, ...], tuple[Frame, Record]] = {}
        self._there: dict[tuple[object, ...], tuple[Frame, Record]] = {}
        # the innermost ends first, and the calls around it were given the same tensor
        for frame in sorted(frames, key=lambda one: one.last):
            call = self._of.get(frame)
            for record in _only(frame.changed, set()) if call is None else _here(call):
                self._here.setdefault(record.identity, (frame, record))
            for record in [] if call is None else _there(call):
                self._there.setdefault(record.identity, (frame, record))

    def behind(self, event: Event) -> tuple[Frame, str | None, str] | None:
        """Return the call that made a wrong input wrong, the reference's name of its module, and
        the argument.
        """
        if event.out:
            return None
        for pair in event.tensors:
            if pair.ratio <= 1:
                continue
            for known, record in ((self._here, pair.b), (self._there, pair.a)):
                frame, argument = known.get(record.identity, (None, None))
                if frame is not None and argument is not None and frame.last <= event.at:
                    call = self._of.get(frame)
                    return frame, None if call is None else call.match.a.name, argument.tensor
        return None

    def said(self, event: Event) -> str:
        """What to say of an output that differs where an argument was changed on one side only."""
        if not event.out:
            return ""
        found = [
            f"{one.tensor} is changed in place, and not in the reference"
            for one in _here(event.call)
        ]
        found += [
            f"{one.tensor} is changed in place in the reference only" for one in _there(event.call)
        ]
        return "; ".join(found)


def _here(call: Called) -> list[Record]:
    """What a call of the port changed in place, and its counterpart did not."""
    return _only(call.b.changed, {one.b.tensor for one in call.outs.tensors})


def _there(call: Called) -> list[Record]:
    return _only(call.a.changed, {one.a.tensor for one in call.outs.tensors})


def _only(changed: Sequence[Record], paired: Set[str]) -> list[Record]:
    return [one for one in changed if one.sketch is not None and one.tensor not in paired]
