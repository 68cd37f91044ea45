"""``polyattn trace isolate``: an unchanged port, each module judged on the reference's tensors."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyattn.cli.arguments import parser, split_program
from polyattn.cli.printing import note
from polyattn.cli.program import check_program, run_program
from polyattn.cli.supervise import run_child, scratch_folder, told_to_end
from polyattn.cli.trace_isolate_ranks import Ranks
from polyattn.cli.trace_verdict import add_options, report, rules_of, tolerance_of
from polyattn.errors import TraceError

if TYPE_CHECKING:
    from polyattn.trace import Trace
    from polyattn.trace.compare import Verdict
    from polyattn.trace.recorders.torch.model_trace import ActivationTrace

__all__ = ["main"]

SUMMARY = """Run the port's program as `python SCRIPT ARGS` would, with the tensors of REFERENCE in
the place of what each module is given and returns, and say which modules differ by themselves: in
bfloat16 too, where errors of rounding hide faults once they add up. REFERENCE is the trace of the
original, recorded with whole tensors (polyattn trace record --tensors '' ...). The program runs
twice, first as it is, unless --port is given; where something differs three times more, to measure
how noisy that module's own arithmetic is. Under torchrun each rank is judged by itself.
Exit code 0: the same, 1: different, 2: cannot say."""


def main(argv: Sequence[str]) -> int:
    """Run a port's program with the reference's tensors; returns 0, 1 or 2."""
    made = _parser()
    ours, program = split_program(made, argv)
    options = made.parse_args(ours)
    check_program(program, again=True)
    rules, tolerance = rules_of(options), tolerance_of(options.tolerance)
    from polyattn.trace import read
    from polyattn.trace.isolate.replay import refuse_without_tensors

    ranks = Ranks.here()
    source = ranks.own(options.reference, "--reference")
    reference = read(source)
    ranks.check(reference, "a reference")
    refuse_without_tensors(reference)  # before the program runs, for it may run long
    _name_files_of(ranks, options)
    with told_to_end() as told, scratch_folder("polyattn-isolate-") as scratch:
        target = Path(options.out) if options.out else scratch / "isolated.jsonl"
        _refuse_what_is_there(options)
        port = read(options.port or _recorded(program, scratch / "port.jsonl", ranks))
        ranks.check(port, "a port's trace")
        run = _Replay(reference, port, rules, options)
        code = run.run(program, scratch / "fed.jsonl", told)
        if options.moved is not None:
            run.write(target)
            return 0
        judged = partial(_judged, reference, rules, tolerance)
        if options.noise and ranks.world == 1 and not code:
            given = [*ours, "--port", options.port or str(scratch / "port.jsonl")]
            run.measure_noise(judged, scratch / "first.jsonl", partial(_moved, given, program))
        verdict = replace(judged(run.write(target)), port=options.out or "")
        if ranks.world > 1:
            note(f"polyattn trace isolate: rank {ranks.rank} of {ranks.world}:")
        report(verdict, options, source, str(target), {"program_exit_code": code})
    if code:
        note(f"polyattn trace isolate: the program ended with exit code {code}")
    ranks.wait_for_all()
    return 2 if code and verdict.equal else verdict.exit_code


def _judged(reference: Trace, rules: Any, tolerance: Any, isolated: Trace) -> Verdict:
    from polyattn.trace.compare import compare

    return compare(reference, isolated, rules=rules, tolerance=tolerance, isolated=True)


def _name_files_of(ranks: Ranks, options: argparse.Namespace) -> None:
    """Have every file that is named on the command line be this rank's own."""
    if options.port:
        options.port = ranks.own(options.port, "--port")
    for name in ("out", "html", "json"):
        given = getattr(options, name)
        if given and given != "-":
            setattr(options, name, str(ranks.file(given)))


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "trace isolate",
        SUMMARY,
        usage="polyattn trace isolate --reference REFERENCE [options] SCRIPT [ARGS] | "
        "-m MODULE [ARGS]",
    )
    made.add_argument(
        "--reference",
        required=True,
        metavar="FILE",
        help="the original's trace, with whole tensors",
    )
    made.add_argument(
        "--port", metavar="FILE", help="the port's ordinary trace, where there is one already"
    )
    made.add_argument("--out", metavar="FILE", help="where to keep the isolated trace")
    made.add_argument(
        "--layers", metavar="REGEX", help="the port's modules to feed; all by default"
    )
    made.add_argument(
        "--upcast",
        choices=("float32", "float64"),
        help="run the port's modules in this dtype: what then agrees was rounding of their own",
    )
    made.add_argument(
        "--no-noise",
        dest="noise",
        action="store_false",
        help="run no more often where something differs: one spacing of the dtype decides",
    )
    made.add_argument("--moved", type=int, metavar="SEED", help=argparse.SUPPRESS)
    add_options(made)
    return made


def _refuse_what_is_there(options: argparse.Namespace) -> None:
    out = Path(options.out) if options.out else None
    if out is not None and out.exists() and (out.is_dir() or out.stat().st_size):
        raise TraceError(f"got --out {out}, which is there already, expected a new file.")


def _recorded(program: Sequence[str], path: Path, ranks: Ranks) -> Path:
    """Run the program as it is, in a process of its own, for its ordinary trace.

    What it prints comes with the second run.
    """
    note("polyattn trace isolate: first run, as it is")
    command = [sys.executable, "-m", "polyattn", "trace", "record", "--out", str(path), "--"]
    done = run_child(
        [*command, *program],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=ranks.first_run(),
    )
    found = ranks.file(path)
    if not found.is_file() and (others := sorted(path.parent.glob(f"{path.stem}.rank*.jsonl"))):
        raise TraceError(
            f"got a program that makes itself one of several ranks (it recorded {others[0].name}), "
            "expected one that a launcher starts with RANK and WORLD_SIZE set: run `torchrun -m "
            "polyattn trace isolate ...`, or call polyattn.hooks.isolate in it."
        )
    if not found.is_file():
        raise TraceError(
            f"got a program whose first run, exit code {done.returncode}, recorded nothing; it "
            f"said:\n{done.stderr.strip()[-2000:]}"
        )
    note("polyattn trace isolate: second run, with the reference's tensors")
    return found


def _moved(ours: Sequence[str], program: Sequence[str]) -> Iterator[Trace]:
    """Yield the isolated traces of runs whose tensors are moved by some roundings, each in a
    process of its own; a run that fails yields none.
    """
    from polyattn.trace import read
    from polyattn.trace.compare.noise import RERUNS

    note(
        f"polyattn trace isolate: something differs; {RERUNS} more runs on moved tensors, for the "
        "noise of its arithmetic (--no-noise leaves them out)"
    )
    for seed in range(RERUNS):
        with scratch_folder("polyattn-isolate-") as folder:
            out = folder / "moved.jsonl"
            command = [sys.executable, "-m", "polyattn", "trace", "isolate", *ours]
            command += ["--out", str(out), "--moved", str(seed), "--", *program]
            run_child(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if out.is_file():
                yield read(out)


class _Replay:
    """A run of the program whose model is fed."""

    def __init__(
        self, reference: Trace, port: Trace, rules: Any, options: argparse.Namespace
    ) -> None:
        import torch

        from polyattn.trace.isolate.replay import feed_of

        self._port = port
        self._layers: str | None = options.layers
        self._dtype = getattr(torch, options.upcast) if options.upcast else None
        self._feed = feed_of(reference, port, rules, dtype=self._dtype)
        if options.moved is not None:
            self._feed = self._feed.perturbed(options.moved)
        self._stack = ExitStack()
        self._run: ActivationTrace | None = None

    def run(self, program: Sequence[str], path: Path, told: Sequence[int]) -> int:
        """Run it and return its exit code; `told`: those of signals that asked for an end."""
        import torch

        from polyattn.hooks import trace_any

        tracing = trace_any(path, after=self._feed_it, weights=False)
        with tracing, self._stack, torch.compiler.set_stance("force_eager"):
            code = run_program(program)
        if told:  # while the program ran, which has ended with it or caught it
            raise SystemExit(told[0])
        if self._run is None:
            raise TraceError(
                "got a program that did not call the model whose trace is the port's, a "
                f"{self._port.header.modules.get('', 'module')}, in this process; it ended with "
                f"exit code {code}."
            )
        return code

    def write(self, target: Path) -> Trace:
        """Write the isolated trace to `target`, and return it."""
        from polyattn.trace import read
        from polyattn.trace.isolate.replay import written

        assert self._run is not None
        return written(read(self._run.path), self._feed, target, self._port)

    def measure_noise(
        self, judged: Callable[[Trace], Verdict], path: Path, moved: Callable[[], Iterator[Trace]]
    ) -> None:
        """Where it may change the verdict, have what is written say the noise of `moved` runs."""
        from polyattn.trace.compare.noise import noise_of, worth_measuring
        from polyattn.trace.isolate.rounding import ROUNDINGS

        isolated = self.write(path)
        if worth_measuring(judged(isolated)):
            self._feed.noise = noise_of(isolated, list(moved()), ROUNDINGS)

    def _feed_it(self, run: ActivationTrace) -> None:
        """Feed the program's first model that is the recorded one."""
        from polyattn.trace.isolate.feeding import feeding
        from polyattn.trace.isolate.precision import widened
        from polyattn.trace.recorders.torch.what_to_record import choose_modules

        names = {name: type(one).__name__ for name, one in run.model.named_modules()}
        if self._run is not None or names != dict(self._port.header.modules):
            return
        self._run = run
        if self._layers is not None:
            self._feed.only(set(choose_modules(run.model, self._layers)))
        self._stack.enter_context(widened(run.model, self._dtype))
        self._stack.enter_context(feeding(run.model, self._feed))
