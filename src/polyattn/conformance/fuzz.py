"""``polyattn fuzz``: random problems through every backend, at any length.

Prints counts for each backend and a line for each failure that makes it again:
``polyattn fuzz --backend NAME --case '...'``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any

import torch
from rich.console import Console

from polyattn.conformance.cases import Case
from polyattn.conformance.check import Verdict, examine, subject
from polyattn.conformance.dropout import examine_dropout
from polyattn.conformance.generate import random_case
from polyattn.conformance.jax_calls import forget, on_device
from polyattn.conformance.jax_ways import several_devices
from polyattn.conformance.report import Failure, Report, Tally
from polyattn.conformance.screen import bar, show_case, show_report
from polyattn.conformance.shrink import shrink
from polyattn.errors import InvalidProblem, PolyattnError, UnknownBackend
from polyattn.selection import scopes
from polyattn.selection.registry import Backend, Missing, registry

__all__ = ["main", "run", "run_case"]

Progress = Callable[[int, Report], None]
_EVERY = {"flex": 10}  # FlexAttention outside a compiler costs torch 20 ms a call (its vmap)
_FORGET = 500  # problems after which the front-end's table of calls is emptied
_FORGET_COMPILED = 50  # and what JAX has compiled
_SHRUNK = 5  # failures of one kind and backend that are made small; the rest are counted as found
INTERRUPTED = 130


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns 0 nothing found, 1 something found, 2 used wrongly or nothing tested, 130 after Ctrl-C.
    """
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    console, errors = Console(), Console(stderr=True)
    if fault := _misused(args):
        errors.print(f"polyattn fuzz: {fault}", style="red", highlight=False, markup=False)
        return 2
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)  # tensors this small only wait for each other
    try:
        if args.case is not None:
            return _main_case(args, console)
        with bar(args.problems, errors) as progress:
            report = run(
                args.problems,
                args.seed,
                args.backend,
                progress,
                args.time_limit,
                args.device,
                args.compiled,
                args.framework,
            )
    except (UnknownBackend, InvalidProblem, PolyattnError) as error:
        errors.print(f"polyattn fuzz: {error}", style="red", highlight=False, markup=False)
        return 2
    finally:
        torch.set_num_threads(before)
    if args.json:
        console.out(json.dumps(report.to_dict(), indent=2), highlight=False)
    else:
        show_report(report, console)
    if report.ok and not report.tested and not report.interrupted:
        errors.print(_nothing_tested(report), style="red", highlight=False, markup=False)
        return 2
    return INTERRUPTED if report.interrupted else 0 if report.ok else 1


def _misused(args: argparse.Namespace) -> str:
    """Say what the arguments ask for that there is not; nothing where they are fine."""
    if args.framework == "jax" and args.compiled:
        return "got --compiled with --framework jax, expected one of them: JAX compiles every case."
    return ""


def _nothing_tested(report: Report) -> str:
    names = ", ".join(report.untested)
    return (
        f"polyattn fuzz: got no problem that {names} takes among {report.problems}, expected one "
        "to judge it by. Look at what it declares (polyattn explain names the reasons), or ask for "
        "more --problems."
    )


def _main_case(args: argparse.Namespace, console: Console) -> int:
    case = Case.from_spec(args.case)
    verdicts = run_case(case, args.backend, args.device, args.compiled, args.framework)
    suspects = [name for name, v in verdicts.items() if v.fails or v.able]
    if args.json:
        rows = {name: vars(verdict) for name, verdict in verdicts.items()}
        console.out(json.dumps({"case": case.spec, "verdicts": rows}, indent=2), highlight=False)
    else:
        show_case(case, verdicts, console)
    if not suspects and all(v.outcome.startswith("refused") for v in verdicts.values()):
        return 2  # nobody took it: nothing can be said
    return 1 if suspects else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="polyattn fuzz", description="Random problems through every backend, against float64."
    )
    add = parser.add_argument
    add("--problems", type=_count, default=1000, metavar="N", help="how many (default 1000)")
    add("--seed", type=int, default=0, metavar="S", help="which ones (default 0)")
    add("--backend", metavar="NAME", help="one backend or a group instead of all")
    add("--framework", choices=("torch", "jax"), default="torch", help="whose backends (torch)")
    add("--case", metavar="SPEC", help="one case, as a failure's line gives it")
    add("--device", default="cpu", help="cpu (default) or cuda; with JAX also rocm or tpu")
    add("--compiled", action="store_true", help="inside torch.compile(fullgraph=True)")
    add("--time-limit", type=_seconds, metavar="SECONDS", help="stop after the case that passes it")
    add("--threads", type=_count, default=1, metavar="N", help="torch's threads (default 1)")
    add("--json", action="store_true", help="print the report as JSON")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a count of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not found >= 0:  # NaN, too
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seconds, 0 or more")
    return found
