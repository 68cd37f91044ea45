"""Judging the calls of aligned modules: how far inputs and outputs are apart, and what that is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from polyattn.trace.compare.alignment import Alignment, calls
from polyattn.trace.compare.called import Called, Tensor
from polyattn.trace.compare.distance import COARSE, Distance, distance, floating, precision
from polyattn.trace.compare.frames import Frame, changed_in_place
from polyattn.trace.compare.inputs_without_effect import without_effect
from polyattn.trace.compare.tensor_pairs import pair
from polyattn.trace.compare.thresholds import Limit, Thresholds
from polyattn.trace.format.record import Record

__all__ = ["judge"]


def judge(
    alignment: Alignment,
    thresholds: Thresholds,
    steps: set[int | None],
    drift: Mapping[tuple[Frame, bool], int] | None = None,
) -> tuple[list[Called], list[Frame], list[Frame], list[str]]:
    """Return the calls of all matches in the port's order, with their tensors' distances.

    And the calls without a partner, of the reference and of the port, and notes on them. `drift`:
    of the port's calls, where they were fed the reference's tensors.
    """
    found, missing, extra, notes = [], [], [], []
    for match in alignment.matches.values():
        pairs, lacking, more, said = calls(match)
        found += [Called(match, a, b) for a, b in pairs]
        missing += [one for one in lacking if one.step in steps]
        extra += [one for one in more if one.step in steps]
        if said and match.how in ("name", "rule", "prefix", "weights"):
            notes.append(said)
    found.sort(key=lambda call: (call.b.first, -call.b.last))
    usual = _usual(found)
    for call in found:
        call.ins.tensors = [_measured(x, y, usual) for x, y in pair(call.a.ins, call.b.ins)]
        came_out = [*pair(call.a.outs, call.b.outs), *_left_by_both(call)]
        call.outs.tensors = [_measured(x, y, usual) for x, y in came_out]
        if drift is not None:
            call.ins.drift = drift.get((call.b, False), 0)
            call.outs.drift = drift.get((call.b, True), 0)
    _limit(found, thresholds)
    for call in found:
        call.ins.tensors = without_effect(call)
    return found, missing, extra, notes


def _left_by_both(call: Called) -> Iterator[tuple[Record, Record]]:
    """The arguments that both sides changed in place, as each left them."""
    names = {one.b.tensor: one.a.tensor for one in call.ins.tensors}
    ours = {record.tensor: record for record in call.a.changed}
    for record in call.b.changed:
        one = ours.get(names.get(record.tensor, record.tensor))
        if one is not None:
            yield one, record


def _usual(found: Sequence[Called]) -> dict[tuple[str, str, str], float]:
    """The largest root mean square of each tensor of the reference, over its calls; and of what
    goes into each module, under the name of its outputs.
    """
    usual: dict[tuple[str, str, str], float] = {}
    for call in found:
        fed = next((_rms(r) for r in call.a.ins if floating(r.dtype) and _rms(r) < 1e4), 0.0)
        first = (call.a.outs or call.a.changed)[:1]
        for record in (*call.a.ins, *call.a.outs, *call.a.changed):
            key = (record.module, record.phase, record.tensor)
            own = max(_rms(record), fed if record in first else 0.0)
            usual[key] = max(usual.get(key, 0.0), own if own < 1e30 else 0.0)
    return usual


def _rms(record: Record) -> float:
    return record.l2 / math.sqrt(record.n) if record.l2 is not None and record.n else 0.0


_NO_LIMIT = Limit(math.inf, math.inf, "none")


def _measured(a: Record, b: Record, usual: dict[tuple[str, str, str], float]) -> Tensor:
    found = distance(a, b, usual.get((a.module, a.phase, a.tensor), 0.0))
    return Tensor(a, b, found, _NO_LIMIT, False, 0.0)


def _limit(found: Sequence[Called], thresholds: Thresholds) -> None:
    """Give each tensor its limit, walking in the port's order: precision is lost, never won."""
    events = sorted((event for call in found for event in call.events()), key=lambda e: e.at)
    eps, before = 0.0, 0
    for event in events:
        match = event.call.match
        judged = []
        first = next((t for t in event.tensors if floating(t.a.dtype)), None)
        for one in event.tensors:
            if floating(one.a.dtype) and floating(one.b.dtype):
                eps = max(eps, precision(one.a.dtype), precision(one.b.dtype))
            names = (match.a.name, match.b.name)
            limit = thresholds.of(one.a, names, eps, before, event.drift, one.b.noise)
            main = one is first or first is None
            sure = event.out and not changed_in_place(one.b)
            apart = one.distance if sure or (main and not event.out) else _optional(one)
            judged.append(Tensor(one.a, one.b, apart, limit, main, eps))
        event.tensors = judged
        before += event.out and not event.call.b.children


def _optional(one: Tensor) -> Distance:
    """The distance of a further input, or of how it was left: another rank or width is another
    interface, as of masks.
    """
    a, b = one.a, one.b
    if a.n == b.n or (len(a.shape) == len(b.shape) and a.shape[-1:] == b.shape[-1:]):
        return one.distance
    return Distance(0.0, False, f"an input of another form: {one.distance.why}")


def coarse(tensor: Tensor) -> bool:
    """Whether its precision leaves a grey zone."""
    return tensor.eps > COARSE
