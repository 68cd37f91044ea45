"""``polyattn trace record``: an unchanged program, with what its models compute in a file."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from polyattn.cli.arguments import parser, split_program
from polyattn.cli.printing import emit_json, note
from polyattn.cli.program import check_program, run_program
from polyattn.cli.trace_kept import kept
from polyattn.cli.trace_summary import Summary, summary_of
from polyattn.errors import TraceError
from polyattn.trace.format.output import WAYS_OUT, process_path

if TYPE_CHECKING:
    from polyattn.trace.recorders.torch.any_program import LeftOut, ProgramTrace
    from polyattn.trace.recorders.torch.perturbation import Perturbation

__all__ = ["main"]

SUMMARY = """Run a program as `python SCRIPT ARGS` (or `-m MODULE ARGS`) would, and record what goes
into and comes out of every module of the torch models that it calls; afterwards say on stderr what
was recorded. The exit code is the program's. The first model goes to --out, each further one to a
file with its class in the name."""

_NOTHING = "nothing was recorded"


def main(argv: Sequence[str]) -> int:
    """Run a program; returns its exit code."""
    made = _parser()
    ours, program = split_program(made, argv)
    options = made.parse_args(ours)
    check_program(program)
    path = process_path(options.out)
    chosen = _chosen(options)
    code, found, problems = _record(program, path, chosen)
    summaries = [
        (type(run.model).__name__, summary_of(_as_given(run.path, path))) for run in found.runs
    ]
    whole = kept([one.path for _, one in summaries]) if options.tensors else None
    perturbation = chosen["perturb"]
    if options.json:
        emit_json(
            {
                "exit_code": code,
                "traces": [{"model": m, **one.to_dict()} for m, one in summaries],
                "left_out": [one._asdict() for one in found.left_out],
                "tensors": None if whole is None else whole.to_dict(),
                "perturbed": None if perturbation is None else perturbation.to_dict(),
                "problems": problems,
            },
            options.json,
        )
    said = [*_said(summaries, found.left_out, path, not problems)]
    said += [str(one) for one in (whole, perturbation) if one is not None and summaries]
    for line in [*problems, *said]:
        note(f"polyattn trace record: {line}")
    return code


def _as_given(path: Path, named: Path) -> Path:
    """Return a trace's path as --out named it: from the current folder, or the whole of it."""
    return path if named.is_absolute() else Path(os.path.relpath(path))


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "trace record",
        SUMMARY,
        usage="polyattn trace record [options] SCRIPT [ARGS] | -m MODULE [ARGS]",
    )
    made.add_argument(
        "--out",
        metavar="FILE",
        default="polyattn-trace.jsonl",
        help="where to (polyattn-trace.jsonl); <pid> is this process",
    )
    made.add_argument("--overwrite", action="store_true", help="replace the file of another run")
    made.add_argument(
        "--layers", metavar="REGEX", help="modules whose name has this in it; all by default"
    )
    made.add_argument(
        "--stats",
        metavar="A,B",
        help="statistics to keep, as abs_mean,max; all by default, and `diff` needs sketch and l2",
    )
    made.add_argument(
        "--steps", metavar="0,5|0-3", help="steps to record, of programs that use trace_step"
    )
    made.add_argument(
        "--tensors",
        action="append",
        default=[],
        metavar="REGEX",
        help="modules whose tensors are kept whole, beside FILE: all whose name has "
        "this in it, '' is every one; may be repeated",
    )
    made.add_argument("--gradients", action="store_true", help="record gradients too")
    made.add_argument("--parameters", action="store_true", help="record each module's weights too")
    made.add_argument(
        "--perturb",
        metavar="SEED",
        help="multiply every weight by 1 + eps * u, u random in -1..1 and eps the "
        "spacing of its dtype: a rerun for `calibrate`",
    )
    return made


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    """The options of the trace; what can be wrong with them is said before the program runs."""
    from polyattn.trace import rank_path
    from polyattn.trace.recorders.torch.heading import rank_and_world
    from polyattn.trace.recorders.torch.what_to_record import choose_statistics, choose_steps

    choose_statistics(options.stats)
    choose_steps(options.steps)
    layers = None if options.layers is None else _pattern("--layers", options.layers)
    tensors = [_pattern("--tensors", one) for one in options.tensors]
    perturbation = None if options.perturb is None else _perturbation(options.perturb)
    path = rank_path(options.out, *rank_and_world())
    if path.is_dir():
        raise TraceError(f"got --out {path}, which is a folder, expected a file to write.")
    if path.is_file() and path.stat().st_size and not options.overwrite:
        raise TraceError(
            f"got --out {path}, which holds {path.stat().st_size} bytes already, expected a new or "
            f"empty file. {WAYS_OUT}"
        )
    return {
        "layers": layers, "stats": options.stats, "steps": options.steps,
        "tensors": tensors or None, "gradients": options.gradients,
        "parameters": options.parameters, "overwrite": options.overwrite, "perturb": perturbation,
    }  # fmt: skip


def _pattern(option: str, given: str) -> re.Pattern[str]:
    try:
        return re.compile(given)
    except re.error as error:
        raise TraceError(
            f"got {option} {given!r}, expected a regular expression ({error})."
        ) from error


def _perturbation(given: str) -> Perturbation:
    """The process ends after the program, so no weights are kept to be put back."""
    from polyattn.trace.recorders.torch.perturbation import Perturbation

    if not given.isascii() or not given.isdecimal():
        raise TraceError(f"got --perturb {given!r}, expected a seed: an integer, 0 or more.")
    return Perturbation(int(given), keep=False)


def _record(
    program: Sequence[str], path: Path, options: dict[str, Any]
) -> tuple[int, ProgramTrace, list[str]]:
    """Return the exit code, what was traced, and what went wrong with the trace."""
    from polyattn.hooks import trace_any

    problems: list[str] = []
    tracing = trace_any(path, **options)
    found = tracing.__enter__()
    try:
        with _own_errors(problems):
            code = run_program(program)
        code = 2 if problems else code
    finally:
        with _closing(problems):
            tracing.__exit__(None, None, None)
    lost = any(_NOTHING not in problem for problem in problems)
    return code or (2 if lost else 0), found, problems


@contextmanager
def _own_errors(problems: list[str]) -> Iterator[None]:
    """An error of the trace that ends the program is a line, not the program's traceback."""
    before = sys.excepthook

    def shown(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if isinstance(error, TraceError):
            problems.append(str(error))
        else:
            before(kind, error, at)

    sys.excepthook = shown
    try:
        yield
    finally:
        if sys.excepthook is shown:
            sys.excepthook = before


@contextmanager
def _closing(problems: list[str]) -> Iterator[None]:
    """Collect what the trace says at its end, once: it warns and logs the same."""

    def again(record: logging.LogRecord) -> bool:
        return _NOTHING not in record.getMessage()

    logger = logging.getLogger("polyattn.trace")
    logger.addFilter(again)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    except TraceError as error:
        problems.append(str(error))
    finally:
        logger.removeFilter(again)
    problems += [str(one.message) for one in caught]


def _said(
    summaries: Sequence[tuple[str, Summary]], left_out: Sequence[LeftOut], path: Path, why: bool
) -> Iterator[str]:
    for model, one in summaries:
        yield f"{model}: {one}"
    if summaries:  # or else the error says it of all
        for (model, reason), count in Counter(left_out).items():
            several = f"{count} of them" if count > 1 else "it"
            yield f"{model}: not traced ({several}): {reason}"
    if not summaries:
        reason = ": the program called no torch model in this process" if why else ""
        old = f"{path} is of an earlier run" if path.exists() else "there is no file"
        yield f"{_NOTHING.upper()}{reason}; {old}."
    elif not any(one.records for _, one in summaries):
        yield f"{_NOTHING.upper()}."
