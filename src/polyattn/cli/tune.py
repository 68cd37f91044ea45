"""``polyattn tune``: measure a program's attention problems, and look after the table of times."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from polyattn import flags as knobs
from polyattn.cli.arguments import number, parser, split_program
from polyattn.cli.printing import console, emit_json, note, seconds, table
from polyattn.cli.program import check_program
from polyattn.cli.progress import progress_bar
from polyattn.errors import PolyattnError
from polyattn.outputs import check_output
from polyattn.selection.registry import registry

if TYPE_CHECKING:
    from polyattn.integrations.program.asked import Record
    from polyattn.measure.results import CaseResult, TuningResult

__all__ = ["main", "print_result", "progress_bar"]

SUMMARY = """Run a program, record its attention problems, time every capable backend on each
(checked against the float64 reference first), and store the times in the tuning table, from
which later choices are made. Times never override a request. Ctrl-C keeps what is done."""


def main(argv: Sequence[str]) -> int:
    """Tune, or manage the table; returns 0, or 1 when something was left without a time.

    128 + N where a signal N asked for an end.
    """
    made = _parser()
    ours, program = split_program(made, argv)
    options = made.parse_args(ours)
    managing = [name for name in _MANAGE if getattr(options, name) is not None]
    if managing:
        if program or options.from_record or len(managing) > 1:
            raise PolyattnError(
                f"got --{managing[0].removesuffix('_')} together with something else to do, "
                "expected one thing at a time."
            )
        return _MANAGE[managing[0]](options)
    if options.from_record and program:
        raise PolyattnError("got --from-record and a program, expected one of them.")
    if options.from_record and options.record:
        raise PolyattnError(
            "got --from-record and --record, expected one of them: the problems are in a file "
            "already."
        )
    if not options.from_record:
        check_program(program)
    check_output("--json", options.json)
    check_output("--record", options.record)
    return _tune(options, program)


def _parser() -> argparse.ArgumentParser:
    made = parser("tune", SUMMARY, usage="polyattn tune [options] SCRIPT [ARGS] | -m MODULE [ARGS]")
    made.add_argument(
        "--from-record", metavar="FILE", help="tune what `polyattn run --record FILE` wrote"
    )
    made.add_argument("--record", metavar="FILE", help="write the recorded problems too")
    made.add_argument(
        "--rounds",
        type=number("rounds", 5, 1000),
        default=5,
        metavar="N",
        help="rounds of every measurement, at least 5",
    )
    made.add_argument(
        "--prepare-limit",
        type=number("seconds", 1),
        default=60.0,
        metavar="SECONDS",
        help="for one candidate to compile, be checked and warm up (default 60)",
    )
    made.add_argument(
        "--prepare-total",
        type=number("seconds", 0),
        default=600.0,
        metavar="SECONDS",
        help="for all candidates that are slow to get ready (default 600)",
    )
    manage = made.add_argument_group("the table")
    manage.add_argument("--show", action="store_const", const=True, help="print its rows")
    manage.add_argument("--export", metavar="FILE", help="write its rows as JSON; - is stdout")
    manage.add_argument(
        "--import", dest="import_", metavar="FILE", help="take the rows of an export"
    )
    manage.add_argument("--merge", metavar="FILE", help="take the rows of another table's file")
    manage.add_argument("--forget", metavar="all|backend=NAME|device=TEXT", help="delete rows")
    return made


def _show(options: argparse.Namespace) -> int:
    rows, flags = _table().rows(), _table().flags()
    differ, unknown = _against_now(flags)
    if options.json:
        plain = [{**_fields(key), **_fields(one)} for key, one in rows]
        answer = {
            "rows": json.loads(json.dumps(plain).replace("Infinity", "null")),
            "flags": flags,
            "differ": differ,
            "unknown": unknown,
        }
        emit_json(answer, options.json)
        return 0
    words = _in_a_word(flags, differ, unknown)
    printed = [
        (
            _problem(key.problem),
            one.backend,
            "" if one.config == "{}" else one.config,
            seconds(one.median_s) if one.verified else "",
            "yes" if one.verified else "WRONG",
            words.get(one.flags, "not recorded"),
            f"{key.device}; {key.versions}",
            one.measured_at[:19],
        )
        for key, one in rows
    ]
    out = console()
    out.print(table(_SHOWN, printed, f"{len(rows)} rows in {_table().path}"))
    for name in (*differ, *unknown):
        count = sum(one.flags == name for _, one in rows)
        out.print(f"{words[name]}: {_counted(count)} measured under ", end="", markup=False)
        for line in _flags_then(name, differ, unknown):
            out.print(line, markup=False)
    for line in _table().notices:
        note(f"tuning table: {line}")
    return 0


def _problem(text: str) -> str:
    """Return a row's problem in words, or as it stands: the table keeps any text for a key."""
    from polyattn.problem import Problem

    try:
        return str(Problem.from_json(text))
    except PolyattnError:
        return text


_SHOWN = (
    "problem class*", "backend", "config", "median>", "right", "flags", "device and versions*",
    "measured (UTC)",
)  # fmt: skip


def _flags_then(name: str, differ: dict[str, Any], unknown: dict[str, str]) -> list[str]:
    """Say how the flags of rows differ from those now in force, or why that cannot be said."""
    if name in unknown:
        return [f"flags that cannot be compared with those now: {unknown[name]}"]
    head = "flags that differ from those in force now (then, and now):"
    return [head, *(f"  {line}" for line in knobs.lines(differ[name]))]


def _counted(rows: int) -> str:
    return "1 row was" if rows == 1 else f"{rows} rows were"


def _against_now(flags: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return, by digest, the knobs that stood otherwise than now, and why some cannot be said."""
    differ, unknown = {}, {}
    now: dict[str, Any] = {}
    for name, snapshot in flags.items():
        try:
            framework = knobs.check(snapshot, "a snapshot in the table")[knobs.META]["framework"]
            if framework not in now:
                now[framework] = _in_force(framework)
            # What could not be read is not known to differ: some knobs need a device in use.
            hidden = {
                *snapshot[knobs.META]["unreadable"],
                *now[framework][knobs.META]["unreadable"],
            }
            found = knobs.diff(snapshot, now[framework])
            if known := {knob: pair for knob, pair in found.items() if knob not in hidden}:
                differ[name] = known
        except (PolyattnError, ImportError) as error:
            unknown[name] = str(error)
    return differ, unknown


def _in_force(framework: str) -> dict[str, Any]:
    if framework == "torch":
        from polyattn.torch.flags import snapshot as of_torch

        return of_torch()
    if framework == "jax":
        from polyattn.jax.flags import snapshot as of_jax

        return of_jax()
    raise PolyattnError(f"got flags of {framework!r}, expected those of torch or jax.")


def _in_a_word(
    flags: dict[str, Any], differ: dict[str, Any], unknown: dict[str, str]
) -> dict[str, str]:
    """Return what the table says of each digest; those that differ are numbered."""
    words = dict.fromkeys(flags, "as now")
    words |= {name: f"differ ({number})" for number, name in enumerate(differ, 1)}
    return words | {name: f"unknown ({number})" for number, name in enumerate(unknown, 1)}


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _export(options: argparse.Namespace) -> int:
    if options.export == "-":
        return _export_to_stdout(options)
    count = _table().export_json(options.export)
    return _said(options, f"{count} rows written to {options.export}", count)


def _export_to_stdout(options: argparse.Namespace) -> int:
    if options.json:
        raise PolyattnError("got --export - and --json, expected one of them: both are JSON.")
    _table().export_json(sys.stdout)
    for line in _table().notices:
        note(f"tuning table: {line}")
    return 0 if _table().persistent else 1


def _import(options: argparse.Namespace) -> int:
    count = _table().import_json(options.import_)
    return _said(options, f"{count} rows of {options.import_} are new or newer; taken", count)


def _merge(options: argparse.Namespace) -> int:
    count = _table().merge(options.merge)
    return _said(options, f"{count} rows of {options.merge} are new or newer; taken", count)


def _forget(options: argparse.Namespace) -> int:
    what, _, value = options.forget.partition("=")
    if options.forget != "all" and (what not in ("backend", "device") or not value):
        raise PolyattnError(
            f"got --forget {options.forget!r}, expected all, backend=NAME or device=TEXT."
        )
    if what == "backend":
        value = registry.known(value, asked_by="--forget backend")
    count = _table().forget(**({what: value} if value else {}))
    return _said(options, f"{count} rows deleted", count)


_MANAGE: dict[str, Any] = {
    "show": _show, "export": _export, "import_": _import, "merge": _merge, "forget": _forget,
}  # fmt: skip


def _table() -> Any:
    from polyattn.tuning import lookup

    return lookup.table()


def _said(options: argparse.Namespace, message: str, count: int) -> int:
    table_ = _table()
    if options.json:
        emit_json(
            {"rows": count, "path": str(table_.path), "notices": table_.notices}, options.json
        )
    else:
        print(message)
        for line in table_.notices:
            note(f"tuning table: {line}")
    return 0 if table_.persistent else 1


_TOLD_TO_END = (129, 130, 143)
"""The exit codes after SIGHUP, SIGINT and SIGTERM, which ask all of this to end."""


def _tune(options: argparse.Namespace, program: list[str]) -> int:
    record, code = _recorded(options, program)
    if code in _TOLD_TO_END:
        if code != 130:
            note(f"polyattn tune: the program was told to end (exit code {code}); nothing is tuned")
        return code
    if not record.cases:
        note("polyattn tune: the program had no attention problem that polyattn models")
        return 1
    from polyattn.measure.tune import Bounds, tune

    bounds = Bounds(int(options.rounds), options.prepare_limit, options.prepare_total)
    with progress_bar("tuning") as report:
        result = tune(record.cases, bounds=bounds, progress=report)
    if options.json:
        emit_json({**result.to_dict(), "program_exit_code": code}, options.json)
    else:
        print_result(result)
    for line in _table().notices:
        note(f"tuning table: {line}")
    if code:
        note(f"polyattn tune: the program ended with exit code {code}; tuned what it did before")
    if result.interrupted:
        done = f"{len(result.classes)} of {result.total_classes} classes"
        note(f"interrupted: {done} are measured and kept")
        return 130
    complete = all(any(row.verified for row in one.rows) for one in result.classes)
    return 0 if complete and not code and _table().persistent else 1


def _recorded(options: argparse.Namespace, program: list[str]) -> tuple[Record, int]:
    from polyattn.integrations.program.record_file import read_record, write_record

    if options.from_record:
        return read_record(options.from_record), 0
    from polyattn.cli.run import record_program

    asked = argparse.Namespace(backend=[], never=[], on_unsupported=None)
    code, record = record_program(program, asked)
    if options.record:
        write_record(record, options.record)
    return record, code


def print_result(result: TuningResult) -> None:
    """Print, for each case, every candidate, and the regret of the choices."""
    out = console()
    for case in result.cases:
        out.print(f"{case.problem}  ({case.calls} calls)", style="bold", markup=False)
        if case.skipped:
            out.print(f"not measured: {case.skipped}", markup=False)
        out.print(table(_COLUMNS, _candidate_rows(case)))
        out.print(_verdict(case), markup=False)
        out.print()
    _print_regret(out, result)


_COLUMNS = (
    "backend", "median>", "min - max", "ratio>", "forward>", "right", "error", "", "note*",
)  # fmt: skip


def _candidate_rows(case: CaseResult) -> Iterator[tuple[str, ...]]:
    fastest = min((t.median_s for t in case.timed if t.median_s), default=None)
    for timed in sorted(case.timed, key=lambda t: (t.median_s is None, t.median_s or 0)):
        known = timed.median_s and fastest
        yield (
            timed.label,
            seconds(timed.median_s),
            f"{seconds(timed.min_s)} - {seconds(timed.max_s)}" if known else "",
            f"{timed.median_s / fastest:.2f}" if timed.median_s and fastest else "",
            seconds(timed.forward_s),
            "yes" if timed.verified else "WRONG" if timed.status == "wrong" else "",
            f"{timed.error:.1e} of {timed.tolerance:.1e}" if timed.tolerance else "",
            "chosen" if timed.label == case.chosen else "",
            timed.note or ("" if timed.status == "ok" else timed.status),
        )


def _verdict(case: CaseResult) -> str:
    if case.regret is None or case.regret_range is None:
        return "no choice could be measured"
    low, high = case.regret_range
    busy = f"; others took up to {case.foreign:.0%} of the cores" if case.foreign > 0.06 else ""
    return (
        f"chosen: {case.chosen} ({case.source}), regret {case.regret:.3f} "
        f"({low:.3f} - {high:.3f}); without tuning: {case.heuristic}{busy}"
    )


def _print_regret(out: Any, result: TuningResult) -> None:
    total, worst, before = result.regret(), result.worst_regret(), result.heuristic_regret()
    if total is None or worst is None:
        return
    out.print(
        f"selection regret (time of the chosen over the fastest right backend, goal 1.02): "
        f"{total:.3f} over all calls, {worst:.3f} at worst; without tuning {before or 0:.3f}"
    )
