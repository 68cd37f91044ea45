"""``polyattn trace calibrate``: how large differences are that mean nothing."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from polyattn.cli.arguments import parser
from polyattn.cli.printing import console, emit_json, note
from polyattn.cli.program import check_program
from polyattn.cli.trace_reruns import reruns
from polyattn.cli.trace_table import print_table, printable, separate
from polyattn.errors import TraceError
from polyattn.trace import Record, Trace, read

if TYPE_CHECKING:
    from polyattn.trace.compare import Floor

__all__ = ["main"]

SUMMARY = """Measure how large differences are that mean nothing, for `polyattn trace diff --floor`:
REFERENCE is the trace of a run, each RERUN one of the same program on the same inputs with every
weight multiplied by 1 + eps * u, u random in -1..1 and eps the spacing of its dtype, as `polyattn
trace record --perturb SEED` makes it. Or give the program after --, and it is run again --runs
times. What is no such rerun is refused, with the reason. No framework is imported here."""

_USAGE = """polyattn trace calibrate --out FLOOR.json REFERENCE RERUN [RERUN ...]
       polyattn trace calibrate --out FLOOR.json [--runs N] REFERENCE -- SCRIPT [ARGS]"""

_MEDIAN, _LARGEST = 0.25, 1.0
"""Errors from which on a run is another computation in any dtype: perturbed by rounding, bfloat16
stays below, and independent tensors are 1.4 apart."""

_SPACINGS, _SPACINGS_SAME = 2.0**16, 2.0**10
"""The same in spacings of the run's coarsest dtype, for finer ones: with perturbed weights, where
long loops amplify much, and with the very same weights, where only the device's order differs."""

_SHARED = 0.5


def main(argv: Sequence[str]) -> int:
    """Build a floor and save it; returns 0."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    made, program = _parser(), list(argv[at + 1 :])
    options = made.parse_args(separate(argv[:at]))
    _check(options, program, at < len(argv))
    reference = read(options.reference)
    if "perturb" in reference.header.selection:
        raise TraceError(
            f"got the reference {options.reference}, which was recorded with --perturb, expected "
            "the run with the weights as they are."
        )
    if program:
        found = list(reruns(reference, program, options.runs, _unsuitable))
    else:
        found = _given(reference, options.reruns)
    return _calibrate(reference, found, options)


def _parser() -> argparse.ArgumentParser:
    made = parser("trace calibrate", SUMMARY, usage=_USAGE)
    made.add_argument("reference", metavar="REFERENCE")
    made.add_argument("reruns", nargs="*", metavar="RERUN")
    made.add_argument("--out", required=True, metavar="FLOOR.json", help="the file to write")
    made.add_argument(
        "--runs",
        metavar="N",
        type=int,
        default=3,
        help="how often to run the program after --, each time with other perturbed weights (3)",
    )
    return made


def _check(options: argparse.Namespace, program: Sequence[str], separated: bool) -> None:
    """Raise for what cannot be meant, before anything runs for long."""
    _refuse_twice([options.reference, *options.reruns])
    _refuse_overwriting(options.out, [options.reference, *options.reruns])
    if separated:
        check_program(program, again=True)
        if options.reruns:
            raise TraceError(
                f"got the rerun {options.reruns[0]} and a program to run again, expected one of "
                "both."
            )
        if options.runs < 1:
            raise TraceError(f"got --runs {options.runs}, expected 1 or more; 3 are usual.")
    elif not options.reruns:
        raise TraceError(
            "got no reruns, expected traces recorded with `polyattn trace record --perturb SEED`, "
            "or -- and the program that is to be run again."
        )
    out = Path(options.out)
    if out.is_dir() or not out.absolute().parent.is_dir():
        why = "it is a folder" if out.is_dir() else "the folder does not exist"
        raise TraceError(f"got --out {out}, which cannot be written: {why}.")


def _given(reference: Trace, paths: Sequence[str]) -> list[Trace]:
    """Read the reruns that were given."""
    found: list[Trace] = []
    seeds: dict[Any, str] = {}
    for path in paths:
        rerun = read(path)
        reason = _unsuitable(reference, rerun)
        seed = rerun.header.selection.get("perturb")
        if isinstance(seed, int):
            if seed in seeds:
                reason = f"it has the same --perturb {seed} as {seeds[seed]}; expected another seed"
            seeds[seed] = path
        if reason:
            raise TraceError(f"got the rerun {path}, which is of no use: {reason}.")
        found.append(rerun)
    return found


def _calibrate(reference: Trace, found: Sequence[Trace], options: argparse.Namespace) -> int:
    from polyattn.trace.compare.calibration import build, save

    floor = build(reference, found)
    written = save(floor, options.out)
    rows = list(_noise(reference, floor))
    if options.json:
        emit_json(
            {"floor": str(written), "runs": floor.runs, "notes": list(floor.notes), "noise": rows},
            options.json,
        )
    else:
        _print(rows, floor, written)
    for said in _notes(reference, found, floor):
        note(f"polyattn trace calibrate: {said}")
    return 0


def _refuse_twice(paths: Sequence[str]) -> None:
    counted = Counter(str(Path(path).resolve()) for path in paths)
    for path in paths:
        if counted[str(Path(path).resolve())] > 1:
            raise TraceError(f"got {path} more than once, expected the trace of another run each.")


def _refuse_overwriting(out: str, paths: Sequence[str]) -> None:
    if str(Path(out).resolve()) in {str(Path(path).resolve()) for path in paths}:
        raise TraceError(f"got --out {out}, which is one of the traces; name another file.")


def _unsuitable(reference: Trace, rerun: Trace) -> str:
    """Why a trace is no rerun of the reference with perturbed weights; empty if it is one."""
    from polyattn.trace.compare.distance import distance, floating, precision

    ours = [record for record in reference.records if record.phase != "param"]
    pairs = list(_pairs(reference, rerun))
    coarsest = max((precision(record.dtype) for record in ours), default=0.0)
    if len(pairs) < _SHARED * len(ours) or not pairs:
        return (
            f"{len(pairs)} of the {len(ours)} records of the reference have a counterpart in it; "
            "expected the same model, with the same layers and steps recorded"
        )
    for one, other in pairs:
        if one.dtype != other.dtype:
            return (
                f"{_named(one)} is {other.dtype} in it and {one.dtype} in the reference; expected "
                "the same precision"
            )
    # a second model is given what the first one made of perturbed weights
    passed_on = min(_MEDIAN, coarsest * _SPACINGS) if "perturb" in rerun.header.selection else 0.0
    for one, error in _inputs(pairs):
        if error > (passed_on if floating(one.dtype) else 0.0):
            return f"{_named(one)} is not as in the reference; expected the same inputs"
    errors = [
        found.error
        for one, other in pairs
        if floating(one.dtype) and (found := distance(one, other)).comparable
    ]
    same = bool(reference.header.weights) and reference.header.weights == rerun.header.weights
    return _implausible(errors, coarsest, same)


def _pairs(reference: Trace, rerun: Trace) -> Iterator[tuple[Record, Record]]:
    """The records of both."""
    known = {(record.rank, *record.key): record for record in rerun.records}
    for record in reference.records:
        if record.phase != "param" and (record.rank, *record.key) in known:
            yield record, known[record.rank, *record.key]


def _inputs(pairs: Sequence[tuple[Record, Record]]) -> Iterator[tuple[Record, float]]:
    """How far what the model is given is apart in both."""
    from polyattn.trace.compare.distance import distance, floating

    for one, other in pairs:
        # what is given to a module further in has been perturbed already
        first = one is pairs[0][0] and not floating(one.dtype)
        if one.phase == "in" and (one.module == "" or first):
            apart = distance(one, other)
            if apart.comparable:
                yield one, apart.error


def _implausible(errors: Sequence[float], eps: float, same: bool) -> str:
    """Why rounding does not make these errors; `same`: the weights are, bit for bit."""
    if not errors:
        return "no tensor of it can be compared; record sketch and l2 in both"
    if not any(errors):
        return (
            "it is the reference's run again, number by number; expected one with perturbed "
            "weights, as of `polyattn trace record --perturb 1`"
        )
    most = min(_LARGEST, eps * (_SPACINGS_SAME if same else _SPACINGS))
    if max(errors) > most or median(errors) > _MEDIAN:
        known = "although its weights are the very same" if same else "which is more than rounding"
        return (
            f"tensors differ by up to {max(errors):.1e}, {known}: this is another computation; "
            "expected the same program, weights, inputs and seed, and no dropout"
        )
    return ""


def _named(record: Any) -> str:
    return printable(f"{record.tensor} ({record.phase}) of {record.module or 'the model'}")


def _noise(reference: Trace, floor: Floor) -> Iterator[dict[str, Any]]:
    """The noise of each dtype at each depth of the tree of modules."""
    from polyattn.trace.compare.distance import floating

    groups: dict[tuple[str, int], dict[tuple[str, str, str], float]] = {}
    for record in reference.records:
        error = floor.of(record)
        if error is not None and floating(record.dtype):
            depth = record.module.count(".") + 1 if record.module else 0
            at = record.module, record.phase, record.tensor
            groups.setdefault((record.dtype, depth), {})[at] = error
    for (dtype, depth), errors in sorted(groups.items()):
        module, phase, tensor = max(errors, key=lambda at: errors[at])
        yield {
            "dtype": dtype,
            "depth": depth,
            "tensors": len(errors),
            "median": median(errors.values()),
            "largest": max(errors.values()),
            "module": module,
            "phase": phase,
            "tensor": tensor,
        }


def _print(rows: Sequence[dict[str, Any]], floor: Floor, written: Path) -> None:
    out = console()
    cells = [
        (
            row["dtype"],
            str(row["depth"]),
            str(row["tensors"]),
            f"{row['median']:.1e}",
            f"{row['largest']:.1e}",
            f"{row['tensor']} ({row['phase']}) of {row['module'] or 'the model'}",
        )
        for row in rows
    ]
    columns = ("dtype", "depth>", "tensors>", "median>", "largest>", "the largest is*")
    out.print(f"relative noise of {floor.runs} reruns, by dtype and depth of modules:")
    print_table(out, columns, cells, [""] * len(cells))
    out.print(f"floor: {written}", markup=False, soft_wrap=True)


def _notes(reference: Trace, reruns: Sequence[Trace], floor: Floor) -> Iterator[str]:
    yield from floor.notes
    for trace in (reference, *reruns):
        yield from trace.notes
    errors = [error for one in reruns for _, error in _inputs(list(_pairs(reference, one)))]
    if any(errors):
        yield (
            f"the model's inputs differ by up to {max(errors):.1e}: they come from another model "
            "that was perturbed too"
        )
    ours = reference.header.weights
    same = [one for one in reruns if ours and one.header.weights == ours]
    if same:
        yield (
            f"{len(same)} of the reruns have the reference's very weights: they show what the "
            "device does differently each time, and not what rounding differently does"
        )
    if len(reruns) < 3:
        yield f"got {len(reruns)}, and fewer than three reruns may miss the largest noise"
