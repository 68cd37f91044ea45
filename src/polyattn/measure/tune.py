"""A tuning run: for each class of recorded problems, who is right, and who of those is fastest.

A class may have several recorded cases. Each is measured; the time stored for the class is the
mean over its cases, weighted by their calls, of the medians. A candidate that is wrong on any
case is stored as not verified, and is never chosen. After storing, the choice is measured once
more against the fastest (the regret), because a time that made somebody win is a lucky one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polyattn.errors import PolyattnError, Unsupported
from polyattn.integrations.program.asked import Case
from polyattn.measure.candidates import Candidate, candidates, ready, synchronise
from polyattn.measure.inputs import Inputs, build
from polyattn.measure.results import CaseResult, ClassResult, Timed, TuningResult
from polyattn.measure.timing import Times, time_interleaved
from polyattn.measure.verify import Truth
from polyattn.problem import Problem
from polyattn.selection import scopes
from polyattn.selection.platforms import platform_of
from polyattn.selection.prepare import select_here
from polyattn.selection.registry import registry
from polyattn.selection.select import select
from polyattn.selection.wishes import Wishes
from polyattn.torch.flags import snapshot
from polyattn.tuning import Key, Measurement, digest, lookup

__all__ = ["Bounds", "Progress", "tune"]

Progress = Callable[[int, int, str], None]
"""``(steps done, steps in all, what is being done)``"""


@dataclass(frozen=True)
class Bounds:
    """How much time a tuning run may take, in seconds.

    `prepare_s`: for one candidate to compile, be checked and warm up; `prepare_total_s`: for all
    of them (who is known to need more than is left is not tried); `call_s`: for one call.
    `total_s`: after which no further class is begun; the rest stays as it was.
    `again`: how often a choice that turns out not to be the fastest is measured again.
    """

    rounds: int = 5
    prepare_s: float = 60.0
    prepare_total_s: float = 600.0
    call_s: float = 2.0
    total_s: float = math.inf
    again: int = 2


class _Purse:
    """What is left of the time for preparing, and what each candidate is known to need."""

    def __init__(self, bounds: Bounds) -> None:
        self.left_s = bounds.prepare_total_s
        self.bounds = bounds
        self.known: dict[str, float] = {}

    def allows(self, candidate: Candidate) -> bool:
        return self.known.get(candidate.label, 0.0) <= max(self.left_s, _QUICK_S)

    def pay(self, candidate: Candidate, seconds: float) -> None:
        self.known[candidate.label] = max(seconds, self.known.get(candidate.label, 0.0))
        if seconds > _QUICK_S:
            self.left_s -= seconds


_QUICK_S = 5.0
_CONTENDER = 1.5
GOAL = 1.02


def tune(
    cases: Iterable[Case],
    *,
    bounds: Bounds | None = None,
    progress: Progress | None = None,
    result: TuningResult | None = None,
) -> TuningResult:
    """Measure and store; an interrupt (Ctrl-C) ends the run, and what is done is kept.

    Pass `result` to see the run grow while it lasts.
    """
    bounds, result = bounds or Bounds(), result or TuningResult()
    report = progress or (lambda done, total, what: None)
    classes: dict[str, list[Case]] = {}
    for case in cases:
        if not case.problem.empty:  # nobody is asked to run those
            classes.setdefault(case.problem_class, []).append(case)
    result.total_classes = len(classes)
    total = sum(len(of_class) for of_class in classes.values())
    done, begin = 0, time.perf_counter()
    purse = _Purse(bounds)
    try:
        for of_class in sorted(classes.values(), key=lambda c: -sum(x.calls for x in c)):
            if time.perf_counter() - begin > bounds.total_s:
                break
            found = []
            for case in of_class:
                found.append(_measured(case, purse, functools.partial(report, done, total)))
                done += 1
                report(done, total, "")
            result.classes.append(_settled(_key(of_class[0].problem), found, bounds))
    except KeyboardInterrupt:
        result.interrupted = True
    return result


Found = tuple[CaseResult, dict[str, Candidate]]


def _measured(case: Case, purse: _Purse, report: Callable[[str], None]) -> Found:
    """Check and time every capable candidate on one case."""
    problem = case.problem.with_(compiled=False)
    outcome = CaseResult(problem, case.calls)
    report(f"reference: {problem.shapes}")
    try:
        inputs = build(case)
        truth = Truth(inputs)
    except (PolyattnError, MemoryError) as error:
        outcome.skipped = str(error)
        return outcome, {}
    every = candidates(inputs.problem)
    for candidate in every:
        report(f"{candidate.label}: {problem.shapes}")
        fastest_s = min(
            (c.first_s for c in every if c.status == "ok" and c.first_s), default=math.inf
        )
        _make_ready(candidate, inputs, truth, purse, fastest_s)
    able = {c.label: c for c in every if c.status == "ok"}
    report(f"timing {len(able)} candidates: {problem.shapes}")
    outcome.timed = [_timed(candidate) for candidate in every]
    times = _times({label: c.step for label, c in able.items()}, problem, purse.bounds.rounds)
    _note_times(outcome, times)
    if inputs.trains:
        forward = {label: c.forward for label, c in able.items()}
        for label, mine in _times(forward, problem, purse.bounds.rounds).items():
            outcome.of(label).forward_s = mine.median
    return outcome, able


def _make_ready(
    candidate: Candidate, inputs: Inputs, truth: Truth, purse: _Purse, fastest_s: float
) -> None:
    if not purse.allows(candidate):
        candidate.status = "too slow"
        candidate.note = (
            f"not tried: it took {purse.known[candidate.label]:.0f} s to get ready before, and the "
            "time for that is used up"
        )
        return
    begin = time.perf_counter()
    bounds = purse.bounds
    ready(
        candidate,
        inputs,
        truth,
        limit_s=bounds.prepare_s,
        call_limit_s=bounds.call_s,
        fastest_s=fastest_s,
    )
    purse.pay(candidate, time.perf_counter() - begin)


def _timed(candidate: Candidate) -> Timed:
    check = candidate.check
    return Timed(
        candidate.backend,
        dict(candidate.config),
        candidate.status,
        candidate.note,
        check.error,
        check.tolerance,
        check.verified,
        prepare_s=candidate.prepare_s,
    )


def _times(
    steps: Mapping[str, Callable[[], object]], problem: Problem, rounds: int
) -> dict[str, Times]:
    if not steps:
        return {}
    return time_interleaved(steps, lambda: synchronise(problem), rounds=rounds)


def _note_times(case: CaseResult, times: Mapping[str, Times]) -> None:
    """Add the rounds to those that are known, and take the medians of all."""
    for label, mine in times.items():
        timed = case.of(label)
        timed.seconds = (*timed.seconds, *mine.seconds)
        timed.median_s = statistics.median(timed.seconds)
        timed.min_s, timed.max_s = min(timed.seconds), max(timed.seconds)
        timed.repeats = len(timed.seconds)
        case.foreign = max(case.foreign, mine.foreign)


def _settled(key: Key, found: list[Found], bounds: Bounds) -> ClassResult:
    """Store, measure the choice against the fastest, and again with more rounds if it lost."""
    one = _stored(key, [case for case, _ in found])
    for attempt in range(bounds.again + 1):
        fresh = [_judge(case, able, bounds) for case, able in found]
        lost = [case for case, _ in found if case.regret is not None and case.regret > GOAL]
        if not lost or attempt == bounds.again:
            break
        for (case, _), times in zip(found, fresh, strict=True):
            _note_times(case, times)
        one = _stored(key, [case for case, _ in found])
    return one


def _stored(key: Key, measured: list[CaseResult]) -> ClassResult:
    """Store the class's rows and make every later choice look again."""
    one = ClassResult(key, measured)
    usable = [case for case in measured if not case.skipped]
    labels = dict.fromkeys(t.label for case in usable for t in case.timed)
    for label in labels:
        of_label = [
            (case, next((t for t in case.timed if t.label == label), None)) for case in usable
        ]
        if all(t is not None and t.median_s is not None for _, t in of_label):
            one.rows.append(_row([(case.calls, t) for case, t in of_label if t is not None]))
        elif wrong := next((t for _, t in of_label if t is not None and t.status == "wrong"), None):
            one.rows.append(_wrong_row(wrong))
    one.flags = _flags_of(measured)  # as they stand where the candidates were timed a moment ago
    one.rows = [dataclasses.replace(row, flags=digest(one.flags)) for row in one.rows]
    lookup.table().record(key, one.rows, one.flags)
    scopes.invalidate()
    return one


def _flags_of(measured: list[CaseResult]) -> dict[str, Any]:
    """Return how the flags of the framework stand that the cases are of."""
    if measured[0].problem.framework == "jax":
        from polyattn.jax.flags import snapshot as of_jax  # where JAX is there

        return of_jax()
    return snapshot()


def _key(problem: Problem) -> Key:
    here = platform_of(problem.framework)
    return lookup.key_for(problem, here.device_description(problem.device), here.versions())


def _row(weighted: list[tuple[int, Timed]]) -> Measurement:
    calls = sum(max(count, 1) for count, _ in weighted)

    def mean(values: Iterable[float | None]) -> float:
        pairs = zip(weighted, values, strict=True)
        return sum(max(count, 1) * (value or 0.0) for (count, _), value in pairs) / calls

    first = weighted[0][1]
    worst = max((t for _, t in weighted), key=lambda t: t.error / (t.tolerance or 1.0))
    low, median, high = (
        mean(t.min_s for _, t in weighted),
        mean(t.median_s for _, t in weighted),
        mean(t.max_s for _, t in weighted),
    )
    return Measurement(
        first.backend,
        json.dumps(first.config),
        median,
        min(low, median),
        max(high, median),
        min(t.repeats for _, t in weighted),
        worst.error,
        worst.tolerance,
        True,
    )


def _wrong_row(wrong: Timed) -> Measurement:
    """Keep that a backend was wrong; its time was not taken, and does not count."""
    error = wrong.error if wrong.error == wrong.error else math.inf
    return Measurement(
        wrong.backend, json.dumps(wrong.config), 1.0, 1.0, 1.0, 1, error, wrong.tolerance, False
    )


def _judge(case: CaseResult, able: dict[str, Candidate], bounds: Bounds) -> dict[str, Times]:
    """Measure the choice beside everybody who could have been better; returns the fresh times."""
    if not able:
        return {}
    try:
        chosen = select_here(case.problem, Wishes())
        heuristic = select(case.problem, Wishes(), registry)
    except Unsupported as error:
        case.skipped = str(error).splitlines()[0]
        return {}
    case.chosen = Candidate(chosen.backend, chosen.config).label
    case.source, case.reason = str(chosen.source), chosen.reason
    case.heuristic = Candidate(heuristic.backend, heuristic.config).label
    medians = {t.label: t.median_s for t in case.timed if t.median_s is not None}
    fastest = min(medians.values())
    contenders = {
        label: able[label].step
        for label in able
        if medians[label] <= _CONTENDER * fastest or label in (case.chosen, case.heuristic)
    }
    if case.chosen not in contenders:
        return {}
    times = _times(contenders, case.problem, bounds.rounds)
    best = min(times, key=lambda label: times[label].median)
    case.fastest, case.fastest_s = best, times[best].median
    case.chosen_s = times[case.chosen].median
    paired = _paired(times[case.chosen], times[best])
    case.regret, case.regret_range = max(1.0, statistics.median(paired)), (min(paired), max(paired))
    if case.heuristic in times:
        paired = _paired(times[case.heuristic], times[best])
        case.heuristic_s = times[case.heuristic].median
        case.heuristic_regret = max(1.0, statistics.median(paired))
    return times


def _paired(mine: Times, other: Times) -> list[float]:
    return [a / b for a, b in zip(mine.seconds, other.seconds, strict=True)]
