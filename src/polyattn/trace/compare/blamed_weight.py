"""The weight to blame: the first that differs, if something that was computed may come of it.

A weight of a module that is not called may be read by the code around it, as `F.linear(h,
self.head.weight)` does. Then the first difference is in that code. Where it is elsewhere, or
nowhere, the weight has nothing to do with it: it is left over, or is used in another run.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyattn.trace.compare.blame import Walk
from polyattn.trace.compare.called import Called
from polyattn.trace.compare.frames import ancestors
from polyattn.trace.compare.parameters import Difference, meant
from polyattn.trace.compare.verdict import Culprit

__all__ = ["blamed_weight", "idle_notes"]

_NAMED = 3


def blamed_weight(
    found: Sequence[Difference], calls: Sequence[Called], walk: Walk
) -> Culprit | None:
    """Return the culprit of a comparison whose weights differ; None where none has an effect."""
    used = [one for one in found if not _idle(one, calls, walk)]
    for one in used:
        if one.kind == "shape" or meant(one):
            continue
        if one.kind == "layout" and _without_effect(one, calls):
            continue
        return Culprit(
            module=one.match.b.name, reference_module=one.match.a.name, kind="parameter",
            phase="param", at=one.match.b.name, tensor=one.param, error=one.error,
            threshold=one.threshold, evidence=one.said,
            others=tuple(dict.fromkeys(
                _name(d) for d in used if d is not one and d.kind == one.kind
            )),
        )  # fmt: skip
    return None


def idle_notes(found: Sequence[Difference], calls: Sequence[Called], walk: Walk) -> list[str]:
    """Return what to say of weights that differ, and that no difference comes of."""
    names = list(dict.fromkeys(_name(one) for one in found if _idle(one, calls, walk)))
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    said = f"{', '.join(names[:_NAMED])}{more}"
    return [f"weights of modules that were not called differ, to no effect here: {said}"]


def _idle(one: Difference, calls: Sequence[Called], walk: Walk) -> bool:
    """Whether a weight has nothing to do with the first difference: its module was not called, and
    what was recorded around it is not where that is.
    """
    module = one.match.b
    if module.frames or one.match.a.frames:
        return False
    around = set(ancestors(module.name))
    if not any(call.b.module in around for call in calls):
        return False  # nothing around it was recorded: it may have been called as well
    return _first_wrong(calls, walk) not in around


def _first_wrong(calls: Sequence[Called], walk: Walk) -> str | None:
    """The name of the module whose code the first difference comes of, or may come of."""
    if walk.culprit is not None:
        return walk.culprit.module
    events = (event for call in calls for event in call.events())
    open_ = [event for event in events if event.status in ("cannot say", "grown")]
    if walk.start is not None or not open_:
        return None  # what was given to both comes of no weight
    first = min(open_, key=lambda event: event.at)
    frame = first.call.b if first.out else first.call.b.parent
    return frame.module if frame is not None else ""


def _without_effect(one: Difference, calls: Sequence[Called]) -> bool:
    """Whether another place of the same values changes nothing."""
    own = [call for call in calls if call.match is one.match and call.ins.agrees]
    return bool(own) and all(call.outs.agrees for call in own)


def _name(one: Difference) -> str:
    return f"{one.match.b.name}.{one.param}"
