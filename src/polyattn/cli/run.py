"""``polyattn run``: an unchanged program, its attention routed through polyattn, and a report."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polyattn.cli.arguments import parser, split_program
from polyattn.cli.printing import console, emit_json, note, table
from polyattn.cli.program import check_program, run_program

if TYPE_CHECKING:
    from polyattn.integrations.recording import Case, Record, Recorder

__all__ = ["add_request", "main", "record_program"]

SUMMARY = """Run a program as `python SCRIPT ARGS` (or `-m MODULE ARGS`) would, with every call of
torch.nn.functional.scaled_dot_product_attention routed through polyattn; afterwards say
on stderr what ran. The exit code is the program's."""


def main(argv: Sequence[str]) -> int:
    """Run a program; returns its exit code."""
    made = _parser()
    ours, program = split_program(made, argv)
    options = made.parse_args(ours)
    check_program(program)
    code, recorder = record_program(program, options)
    record = recorder.record(program)
    if options.record:
        from polyattn.integrations.recording import write_record

        write_record(record, options.record)
        note(f"record: {options.record} ({len(record.cases)} cases)")
    if options.json:
        emit_json(_plain(record, code), options.json)
    else:
        _print(record)
    return code


def _parser() -> argparse.ArgumentParser:
    made = parser("run", SUMMARY, usage="polyattn run [options] SCRIPT [ARGS] | -m MODULE [ARGS]")
    add_request(made)
    made.add_argument(
        "--record", metavar="FILE", help="write the problems, for `polyattn tune --from-record`"
    )
    return made


def add_request(made: argparse.ArgumentParser) -> None:
    """Add the options that ask for backends."""
    made.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="ask for this backend; repeat for an ordered list",
    )
    made.add_argument(
        "--never",
        action="append",
        default=[],
        metavar="NAME",
        help="a backend that may not run; may be repeated",
    )
    made.add_argument(
        "--on-unsupported",
        choices=("error", "fallback"),
        help="what a request that cannot be met does (default: error)",
    )


def record_program(program: Sequence[str], options: argparse.Namespace) -> tuple[int, Recorder]:
    """Run a program with everything recorded; returns its exit code and the recorder."""
    from polyattn.selection.requests import use_backend

    wanted = options.backend or options.never or options.on_unsupported
    request = None
    if wanted:
        request = use_backend(
            *options.backend, never=options.never, on_unsupported=options.on_unsupported
        )
    from polyattn.integrations.recording import Recorder
    from polyattn.integrations.sdpa_patch import route_sdpa

    recorder = Recorder()
    with route_sdpa(recorder, request):
        code = run_program(program)
    return code, recorder


def _classes(record: Record) -> list[list[Case]]:
    grouped: dict[str, list[Case]] = defaultdict(list)
    for case in record.cases:
        grouped[case.problem_class].append(case)
    return sorted(grouped.values(), key=lambda cases: -sum(case.calls for case in cases))


def _print(record: Record) -> None:
    out = console(error=True)
    rows = []
    for cases in _classes(record):
        counted: dict[Any, int] = defaultdict(int)
        for case in cases:
            for ran, calls in case.ran.items():
                counted[ran] += calls
        more = f" (+{len(cases) - 1} alike)" if len(cases) > 1 else ""
        for ran, calls in counted.items():
            reason = ran.reason + (f" (fallback: {ran.fallback})" if ran.fallback else "")
            rows.append(
                (f"{cases[0].problem}{more}", calls, ran.backend, ran.version, ran.source, reason)
            )
    columns = ("problem*", "calls>", "backend", "version", "source", "reason*")
    out.print()
    out.print(table(columns, rows, f"{record.calls} attention calls"))
    if record.passed:
        left = [(p.reason, p.shapes, p.calls) for p in record.passed]
        out.print()
        out.print(table(("reason*", "shapes*", "calls>"), left, "left to torch itself"))
    if not record.calls:
        out.print("The program made no call of scaled_dot_product_attention.")


def _plain(record: Record, code: int) -> dict[str, Any]:
    return {
        "exit_code": code,
        "calls": record.calls,
        "classes": [
            {
                "problem": str(cases[0].problem),
                "problem_class": cases[0].problem_class,
                "calls": sum(case.calls for case in cases),
                "ran": [
                    {**vars(ran), "calls": calls}
                    for case in cases
                    for ran, calls in case.ran.items()
                ],
            }
            for cases in _classes(record)
        ],
        "left_to_torch": [vars(passed) for passed in record.passed],
    }
