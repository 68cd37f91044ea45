"""Noise: how far what a port computes moves if what it is fed moves by a rounding.

An isolated run is repeated with every tensor that is fed moved by a few roundings of its dtype.
What a module then returns is off by so many times the noise of its own arithmetic, whatever the
module is: a linear layer hands on about what it was given, a softmax of large scores many times
that. It needs no wider dtype, which not every module runs in, and a port that loses precision by
itself is not excused by its loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from polyattn.trace.compare.called import Called, Event
from polyattn.trace.compare.counterparts import Key
from polyattn.trace.compare.distance import distance, floating
from polyattn.trace.compare.verdict import Verdict
from polyattn.trace.format.contents import Trace
from polyattn.trace.format.record import Record

__all__ = ["RERUNS", "noise_notes", "noise_of", "worth_measuring"]

RERUNS = 3
"""How many perturbed runs: in one of them a choice may fall another way (an expert, a token), which
moves a result far; the middle one of three is what rounding does."""


def worth_measuring(verdict: Verdict) -> bool:
    """Whether noise may change a verdict: it never makes what is the same another."""
    culprit = verdict.culprit
    return verdict.equal is not True and (culprit is None or culprit.kind != "parameter")


def noise_of(isolated: Trace, reruns: Sequence[Trace], times: float) -> Mapping[Key, float]:
    """Return the relative noise of each tensor of an isolated run, from perturbed runs of it.

    `times`: by how many roundings what they were fed was moved. What has no comparable counterpart
    in most of them is left out.
    """
    errors: dict[Key, list[float]] = {}
    for rerun in reruns:
        known = {_key(record): record for record in rerun.records}
        for record in isolated.records:
            twin = known.get(_key(record))
            if twin is None or not floating(record.dtype):
                continue
            found = distance(record, twin)
            if found.comparable and math.isfinite(found.error):
                errors.setdefault(_key(record), []).append(found.error)
    least = len(reruns) // 2 + 1
    return {key: median(seen) / times for key, seen in errors.items() if len(seen) >= least}


def noise_notes(calls: Sequence[Called]) -> Iterator[str]:
    """Yield what is to be said of measured noise: where it decided, and where it is lacking."""
    events = [event for call in calls for event in call.events()]
    tensors = [(event, one) for event in events for one in event.tensors]
    if not any(one.b.noise is not None for _, one in tensors):
        return
    raised = [(e, one) for e, one in tensors if one.limit.noise and one.ratio > 0]
    if raised:
        event, most = max(raised, key=lambda pair: pair[1].limit.value)
        yield (
            f"{len(raised)} tensors are judged by the measured noise of their module's own "
            f"arithmetic: up to {most.limit.value:.1e}, {_place(event)}"
        )
    lacking = [e for e, one in tensors if one.b.noise is None and one.ratio > 1]
    lacking = [event for event in lacking if any(floating(t.b.dtype) for t in event.tensors)]
    if lacking:
        yield (
            f"the noise of {len(lacking)} calls that differ could not be measured (their tensors "
            f"are not the same in runs with perturbed inputs), first {_place(lacking[0])}: they "
            "are judged by their dtype"
        )


def _place(event: Event) -> str:
    name = event.call.b.module or "the model"
    return f"what {name!r} {'returns' if event.out else 'is given'}"


def _key(record: Record) -> Key:
    return record.module, record.call, record.phase, record.tensor
