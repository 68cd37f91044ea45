"""Handing on: a tensor that a module of the port was given, and did not give to its child."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from polyattn.trace.compare.called import Called
from polyattn.trace.compare.frames import Frame
from polyattn.trace.compare.side import same_class
from polyattn.trace.format.record import Record

__all__ = ["withheld"]


def withheld(
    frame: Frame, of: Mapping[Frame, Called], around: Callable[[Frame], Frame | None]
) -> tuple[Called, Frame, Record] | None:
    """Return who kept a tensor that the wrong call `frame` lacks, from whom, and the tensor.

    None where the call lacks nothing, or where nobody in the port was given it either: then the
    port may well do without, as an attention kernel that makes its own causal mask.
    """
    own = of.get(frame)
    if own is None or not same_class(own.match.a.cls, own.match.b.cls):
        return None  # another class may have another interface
    for record in _lacking(own):
        call, child = own, frame
        while (above := around(child)) is not None and above in of:
            call = of[above]
            given = [t for t in call.ins.tensors if t.a.identity == record.identity]
            if any(t.distance.comparable and t.ratio <= 1 for t in given):
                return call, child, record
            if given:
                break
            child = above
            if not any(one.identity == record.identity for one in _lacking(call)):
                found = withheld(above, of, around)  # it makes the tensor, of what it may lack
                if found is not None:
                    return found
                break
    return None


def _lacking(call: Called) -> list[Record]:
    """What the reference was given and the port not, where the port was given nothing else."""
    paired = [one.a for one in call.ins.tensors]
    others = len(call.b.ins) - len(call.ins.tensors)
    return [] if others else [one for one in call.a.ins if one not in paired]
