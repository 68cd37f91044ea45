"""Random problems through every backend, at any length: what ``polyattn fuzz`` runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any

import torch

from polyattn.conformance.cases import Case
from polyattn.conformance.check import Verdict, examine, subject
from polyattn.conformance.dropout import examine_dropout
from polyattn.conformance.generate import random_case
from polyattn.conformance.jax_calls import forget, on_device
from polyattn.conformance.jax_ways import several_devices
from polyattn.conformance.report import Failure, Report, Tally
from polyattn.conformance.shrink import shrink
from polyattn.errors import PolyattnError
from polyattn.selection import scopes
from polyattn.selection.registry import Backend, Missing, registry

__all__ = ["run", "run_case"]

Progress = Callable[[int, Report], None]
_EVERY = {"flex": 10}  # FlexAttention outside a compiler costs torch 20 ms a call (its vmap)
_FORGET = 500  # problems after which the front-end's table of calls is emptied
_FORGET_COMPILED = 50  # and what JAX has compiled
_SHRUNK = 5  # failures of one kind and backend that are made small; the rest are counted as found


def run(
    problems: int,
    seed: int = 0,
    backend: str | None = None,
    progress: Progress | None = None,
    time_limit: float | None = None,
    device: str = "cpu",
    compiled: bool = False,
    framework: str = "torch",
) -> Report:
    """Draw `problems` cases from `seed` and examine the backends; Ctrl-C ends it early.

    `backend`: a name or a group, which is examined on every case; by default all of the
    framework's, slow ones on every tenth. `compiled`: inside ``torch.compile``, which takes a
    compilation for each case and backend; all of torch's then take their turns, one a case.
    ``progress(done, report)`` is called after each case. `time_limit` in seconds.
    """
    report = Report(seed, problems, device, compiled, framework)
    with _placed(framework, device):
        _run(report, backend, progress, time_limit)
    return report


def _placed(framework: str, device: str) -> AbstractContextManager[Any]:
    """Have JAX's arrays on the device; tensors are put there one by one."""
    if framework != "jax":
        _check_tensors_on(device)
        return nullcontext()
    several_devices()
    return on_device(device)


def _check_tensors_on(device: str) -> None:
    """Raise where no tensors can be made, or none whose values come back, as of torch's meta."""
    try:
        torch.zeros(1).to(device).cpu()
    except Exception as error:  # torch raises whatever it likes, AssertionError among it
        why = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise PolyattnError(
            f"got --device {device}, where torch can keep no results here ({why}), expected one "
            "that is here, as cpu."
        ) from error


def _tensors_on(framework: str, device: str) -> str:
    """Return where a case's tensors lie: JAX gets them from the processor's memory."""
    return "cpu" if framework == "jax" else device


def _run(
    report: Report, backend: str | None, progress: Progress | None, time_limit: float | None
) -> None:
    problems, seed, device = report.asked, report.seed, report.device
    compiled, framework = report.compiled, report.framework
    began = time.perf_counter()
    try:
        backends = _backends(report, backend, device, compiled and backend is None)
        for one in backends if framework == "torch" else ():
            _dropout(report, one, seed, device)
        rng = Random(seed)
        for done in range(1, problems + 1):
            asked = [
                b for b in backends if backend is not None or done % _EVERY.get(b.name, 1) == 0
            ]
            if compiled and backend is None:
                asked = [backends[done % len(backends)]]
            case = random_case(rng)
            try:
                _one(report, case, asked, device, compiled)
            except torch.AcceleratorError as error:  # no call of this process works any more
                lost = f"the device is lost: {str(error).splitlines()[0]}"
                names = " or ".join(one.name for one in asked)
                report.tallies.setdefault(names, Tally()).counts["wrong"] += 1
                report.failures.append(Failure("wrong", names, case.spec, lost, device=device))
                break
            report.problems = done
            if done % _FORGET == 0:
                scopes.invalidate()
            if framework == "jax" and done % _FORGET_COMPILED == 0:
                forget()
            if progress is not None:
                progress(done, report)
            if time_limit is not None and time.perf_counter() - began > time_limit:
                break
    except KeyboardInterrupt:
        report.interrupted = True
    report.close()
    report.seconds = time.perf_counter() - began


def run_case(
    case: Case,
    backend: str | None = None,
    device: str = "cpu",
    compiled: bool = False,
    framework: str = "torch",
) -> dict[str, Verdict]:
    """Examine one case; the verdicts by backend."""
    report = Report(0, 1, framework=framework)
    with _placed(framework, device):
        built = subject(case, _tensors_on(framework, device))
        every = _backends(report, backend, device)
        return {one.name: examine(built, one, compiled) for one in every}


def _backends(
    report: Report, asked: str | None, device: str, compiled: bool = False
) -> list[Backend]:
    """Return those that are here; the others go into the report, or raise when asked for.

    `compiled`: only those that compiled code takes.
    """
    framework = report.framework
    names = (
        registry.names(framework)
        if asked is None
        else registry.expand(asked, asked_by="--backend", framework=framework)
    )
    found = []
    for name in names:
        one = registry.get(name, framework)
        probed = registry.probe(one)
        if isinstance(probed, Missing):
            report.absent[name] = f"{probed.reason} ({probed.how_to_get_it})"
        elif device not in one.capabilities_for(device).devices:
            report.absent[name] = f"does not run on {device}"
        elif compiled and not one.capabilities_for(device).compiled:
            report.absent[name] = "does not run inside torch.compile"
        else:
            found.append(one)
    if not found:
        reasons = "; ".join(f"{name}: {why}" for name, why in report.absent.items())
        raise PolyattnError(f"got nothing to examine on {device}, expected a backend. {reasons}")
    return found


def _one(
    report: Report, case: Case, backends: Sequence[Backend], device: str, compiled: bool
) -> None:
    device = _tensors_on(report.framework, device)
    built = subject(case, device)
    for backend in backends:
        verdict = examine(built, backend, compiled)
        smallest = None
        if verdict.fails and _seen(report, backend.name, verdict.outcome) < _SHRUNK:
            smallest = shrink(case, _fails_alike(backend, verdict, device, compiled))
            verdict = examine(subject(smallest, device), backend, compiled)
        report.add(case, backend.name, verdict, smallest)


def _fails_alike(
    backend: Backend, verdict: Verdict, device: str, compiled: bool
) -> Callable[[Case], bool]:
    what = verdict.detail.partition(":")[0]

    def fails(case: Case) -> bool:
        again = examine(subject(case, device), backend, compiled)
        return again.outcome == verdict.outcome and again.detail.partition(":")[0] == what

    return fails


def _seen(report: Report, backend: str, outcome: str) -> int:
    tally = report.tallies.get(backend)
    return 0 if tally is None else tally.counts[outcome]


def _dropout(report: Report, backend: Backend, seed: int, device: str) -> None:
    verdict = examine_dropout(backend, seed, device)
    if verdict.fails:
        report.tallies.setdefault(backend.name, Tally()).counts[verdict.outcome] += 1
        report.failures.append(
            Failure(verdict.outcome, backend.name, "", verdict.detail, device=device)
        )
