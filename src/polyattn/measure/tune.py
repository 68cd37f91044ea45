"""A tuning run: for each class of recorded problems, who is right, and who of those is fastest.

A class may have several recorded cases. Each is measured; the time stored for the class is the
mean over its cases, weighted by their calls, of the medians. A candidate that is wrong on any
case is stored as not verified, and is never chosen. After storing, the choice is measured once
more against the fastest (the regret), because a time that made somebody win is a lucky one.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from polyattn import scopes, tables
from polyattn.decide import Wishes, select
from polyattn.errors import PolyattnError, Unsupported
from polyattn.integrations.recording import Case
from polyattn.measure.candidates import Candidate, candidates, ready, synchronise
from polyattn.measure.inputs import Inputs, build
from polyattn.measure.results import CaseResult, ClassResult, Timed, TuningResult
from polyattn.measure.timing import time_interleaved
from polyattn.measure.verify import Truth
from polyattn.problem import Problem
from polyattn.registry import registry
from polyattn.torch.resolve import choose, device_description, library_versions
from polyattn.tuning import Key, Measurement

__all__ = ["Bounds", "Progress", "tune"]

Progress = Callable[[int, int, str], None]
"""``(steps done, steps in all, what is being done)``"""


@dataclass(frozen=True)
class Bounds:
    """How much time a tuning run may take.

    `prepare_s`: for one candidate to compile, be checked and warm up; `call_s`: for one call;
    `ratio`: candidates so many times slower than the fastest are timed in single calls.
    """

    rounds: int = 5
    sample_s: float = 0.02
    prepare_s: float = 60.0
    call_s: float = 2.0
    contender: float = 1.5


def tune(cases: Iterable[Case], *, bounds: Bounds | None = None, progress: Progress | None = None,
         result: TuningResult | None = None) -> TuningResult:  # fmt: skip
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
    done = 0
    try:
        for of_class in sorted(classes.values(), key=lambda c: -sum(x.calls for x in c)):
            found = [_measured(case, bounds, lambda what: report(done, total, what)) for case in of_class]
            one = _stored(of_class, [measured for measured, _ in found])
            for measured, ready_ones in found:
                _judge(measured, ready_ones, bounds)
                done += 1
                report(done, total, "")
            result.classes.append(one)
    except KeyboardInterrupt:
        result.interrupted = True
    return result


Found = tuple[CaseResult, dict[str, Candidate]]


def _measured(case: Case, bounds: Bounds, report: Callable[[str], None]) -> Found:
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
        ready(candidate, inputs, truth, limit_s=bounds.prepare_s, call_limit_s=bounds.call_s)
    able = {c.label: c for c in every if c.status == "ok"}
    report(f"timing {len(able)} candidates: {problem.shapes}")
    times = _times(able, inputs, bounds)
    forward = _times(able, inputs, bounds, forward=True) if inputs.trains else {}
    for candidate in every:
        timed = Timed(
            candidate.backend, dict(candidate.config), candidate.status, candidate.note,
            candidate.check.error, candidate.check.tolerance, candidate.check.verified,
            prepare_s=candidate.prepare_s,
        )  # fmt: skip
        if (mine := times.get(candidate.label)) is not None:
            timed.median_s, timed.min_s, timed.max_s = mine.median, mine.low, mine.high
            timed.repeats = len(mine.seconds)
            outcome.foreign = max(outcome.foreign, mine.foreign)
        if candidate.label in forward:
            timed.forward_s = forward[candidate.label].median
        outcome.timed.append(timed)
    return outcome, able


def _times(able: dict[str, Candidate], inputs: Inputs, bounds: Bounds, forward: bool = False):  # type: ignore[no-untyped-def]
    if not able:
        return {}
    steps = {label: c.forward if forward else c.step for label, c in able.items()}
    return time_interleaved(
        steps, lambda: synchronise(inputs.problem), rounds=bounds.rounds, sample_s=bounds.sample_s
    )


def _stored(of_class: list[Case], measured: list[CaseResult]) -> ClassResult:
    """Store the class's rows and make every later choice look again."""
    key = _key(of_class[0].problem)
    one = ClassResult(key, measured)
    usable = [case for case in measured if not case.skipped]
    labels = dict.fromkeys(t.label for case in usable for t in case.timed)
    for label in labels:
        of_label = [(case, next((t for t in case.timed if t.label == label), None)) for case in usable]
        if all(t is not None and t.median_s is not None for _, t in of_label):
            one.rows.append(_row([(case.calls, t) for case, t in of_label if t is not None]))
        elif wrong := next((t for _, t in of_label if t is not None and t.status == "wrong"), None):
            one.rows.append(_wrong_row(wrong))
    table = tables.table()
    table.record(key, one.rows)
    scopes.invalidate()
    return one


def _key(problem: Problem) -> Key:
    return tables.key_for(problem, device_description(problem.device), library_versions())


def _row(weighted: list[tuple[int, Timed]]) -> Measurement:
    calls = sum(max(count, 1) for count, _ in weighted)

    def mean(values: Iterable[float | None]) -> float:
        pairs = zip(weighted, values, strict=True)
        return sum(max(count, 1) * (value or 0.0) for (count, _), value in pairs) / calls

    first = weighted[0][1]
    worst = max((t for _, t in weighted), key=lambda t: t.error / (t.tolerance or 1.0))
    low, median, high = (
        mean(t.min_s for _, t in weighted), mean(t.median_s for _, t in weighted),
        mean(t.max_s for _, t in weighted),
    )  # fmt: skip
    return Measurement(
        first.backend, json.dumps(first.config), median, min(low, median), max(high, median),
        min(t.repeats for _, t in weighted), worst.error, worst.tolerance, True,
    )  # fmt: skip


def _wrong_row(wrong: Timed) -> Measurement:
    """Keep that a backend was wrong; its time was not taken, and does not count."""
    error = wrong.error if wrong.error == wrong.error else math.inf
    return Measurement(
        wrong.backend, json.dumps(wrong.config), 1.0, 1.0, 1.0, 1, error, wrong.tolerance, False
    )  # fmt: skip


def _judge(case: CaseResult, able: dict[str, Candidate], bounds: Bounds) -> None:
    """Measure the choice again, beside everybody who could have been better."""
    if not able:
        return
    try:
        chosen = choose(case.problem, Wishes())
        heuristic = select(case.problem, Wishes(), registry)
    except Unsupported as error:
        case.skipped = str(error).splitlines()[0]
        return
    case.chosen = Candidate(chosen.backend, chosen.config).label
    case.source, case.reason = str(chosen.source), chosen.reason
    case.heuristic = Candidate(heuristic.backend, heuristic.config).label
    medians = {t.label: t.median_s for t in case.timed if t.median_s is not None}
    fastest = min(medians.values())
    contenders = {
        label: able[label].step for label in able
        if medians[label] <= bounds.contender * fastest or label in (case.chosen, case.heuristic)
    }  # fmt: skip
    if case.chosen not in contenders:
        return
    times = time_interleaved(
        contenders, lambda: synchronise(case.problem), rounds=bounds.rounds + 2,
        sample_s=bounds.sample_s,
    )  # fmt: skip
    best = min(times, key=lambda label: times[label].median)
    case.fastest_s, case.chosen_s = times[best].median, times[case.chosen].median
    paired = [
        mine / other
        for mine, other in zip(times[case.chosen].seconds, times[best].seconds, strict=True)
    ]
    case.regret = max(1.0, statistics.median(paired))
    case.regret_range = (min(paired), max(paired))
    if case.heuristic in times:
        case.heuristic_s = times[case.heuristic].median
        case.heuristic_regret = case.heuristic_s / case.fastest_s
    case.foreign = max(case.foreign, times[best].foreign)
