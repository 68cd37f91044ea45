"""Judging the calls of aligned modules: how far inputs and outputs are apart, and what that is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from polyattn.trace.compare.alignment import Alignment, Match, calls
from polyattn.trace.compare.distance import COARSE, Distance, distance, floating, precision
from polyattn.trace.compare.frames import Frame
from polyattn.trace.compare.tensor_pairs import pair
from polyattn.trace.compare.thresholds import Limit, Thresholds
from polyattn.trace.format.record import Record

__all__ = ["Called", "Event", "Tensor", "judge"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Two records that are the same tensor. `main`: the first of its call that is rounded."""

    a: Record
    b: Record
    distance: Distance
    limit: Limit
    main: bool
    eps: float

    @property
    def ratio(self) -> float:
        """The error in units of the threshold: above 1 is a difference."""
        error, limit = self.distance.error, self.limit
        if not self.distance.comparable:
            return 0.0
        if limit.coherent(self.distance, self.a, self.eps):
            return max(1.0 + 1e-9, error / limit.value) if limit.value else math.inf
        return error / limit.value if limit.value else (math.inf if error else 0.0)


@dataclass(eq=False, slots=True)
class Event:
    """What went into a call, or came out of it, in both runs. `at`: when, in the port's order.

    `status`: what the walk makes of it: same, grown, cannot say, differs, or none, not compared.
    `drift`: in an isolated run how many calls that were not fed went into it, else None.
    """

    call: Called
    out: bool
    at: float
    tensors: list[Tensor] = field(default_factory=list)
    status: str = "none"
    drift: int | None = None

    @property
    def compared(self) -> bool:
        """Whether any tensor of it could be compared."""
        return any(one.distance.comparable for one in self.tensors)

    @property
    def worst(self) -> Tensor | None:
        """The tensor that is furthest above its threshold."""
        known = [one for one in self.tensors if one.distance.comparable]
        return max(known, key=lambda one: one.ratio, default=None)

    @property
    def error(self) -> float | None:
        """The error of the worst tensor."""
        worst = self.worst
        return None if worst is None else worst.distance.error

    @property
    def agrees(self) -> bool:
        """Whether all that is compared is within its threshold."""
        return self.compared and all(one.ratio <= 1 for one in self.tensors)


@dataclass(eq=False, slots=True)
class Called:
    """A call of a match in both runs, with its two events."""

    match: Match
    a: Frame
    b: Frame
    ins: Event = field(init=False)
    outs: Event = field(init=False)

    def __post_init__(self) -> None:
        self.ins = Event(self, False, self.b.first)
        self.outs = Event(self, True, self.b.last)

    def events(self) -> Iterator[Event]:
        """What was recorded of both: inputs, then outputs."""
        yield from (event for event in (self.ins, self.outs) if event.tensors)


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
        call.outs.tensors = [_measured(x, y, usual) for x, y in pair(call.a.outs, call.b.outs)]
        if drift is not None:
            call.ins.drift = drift.get((call.b, False), 0)
            call.outs.drift = drift.get((call.b, True), 0)
    _limit(found, thresholds)
    return found, missing, extra, notes


def _usual(found: Sequence[Called]) -> dict[tuple[str, str, str], float]:
    """The largest root mean square of each tensor of the reference, over its calls; and of what
    goes into each module, under the name of its outputs.
    """
    usual: dict[tuple[str, str, str], float] = {}
    for call in found:
        fed = next((_rms(r) for r in call.a.ins if floating(r.dtype) and _rms(r) < 1e4), 0.0)
        for record in (*call.a.ins, *call.a.outs):
            key = (record.module, record.phase, record.tensor)
            own = max(_rms(record), fed if record in call.a.outs[:1] else 0.0)
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
            apart = one.distance if main or event.out else _optional(one)
            judged.append(Tensor(one.a, one.b, apart, limit, main, eps))
        event.tensors = judged
        before += event.out and not event.call.b.children


def _optional(one: Tensor) -> Distance:
    """The distance of a further input: another rank or width is another interface, as of masks."""
    a, b = one.a, one.b
    if a.n == b.n or (len(a.shape) == len(b.shape) and a.shape[-1:] == b.shape[-1:]):
        return one.distance
    return Distance(0.0, False, f"an input of another form: {one.distance.why}")


def coarse(tensor: Tensor) -> bool:
    """Whether its precision leaves a grey zone."""
    return tensor.eps > COARSE
