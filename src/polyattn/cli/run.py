"""``polyattn run``: an unchanged program, its attention routed through polyattn, and a report."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyattn.cli.arguments import number, parser, split_program
from polyattn.cli.program import check_program
from polyattn.cli.supervise import run_supervised
from polyattn.errors import PolyattnError
from polyattn.outputs import check_output

if TYPE_CHECKING:
    from polyattn.integrations.program.asked import Record

__all__ = ["add_request", "main", "record_program"]

SUMMARY = """Run a program as `python SCRIPT ARGS` (or `-m MODULE ARGS`) would, with every call of
torch.nn.functional.scaled_dot_product_attention routed through polyattn, in the processes
that it starts too; afterwards say on stderr what ran. The exit code is the program's."""

_WIDTH = 80
_GAINS_S = 60.0


def main(argv: Sequence[str]) -> int:
    """Run a program, or report on a record; returns the program's exit code, or 0.

    It is 2 where the program ended well and an output could not be written.
    """
    made = _parser()
    ours, program = split_program(made, argv)
    options = made.parse_args(ours)
    _check_outputs(options)
    if options.from_record:
        code, record = 0, _stored(options, program)
    else:
        check_program(program)
        code, record = record_program(program, options)
    if options.gains:
        record = measured(record, options.gains)
    whole = _report(record, code, options)
    return code if whole else code or 2


def _parser() -> argparse.ArgumentParser:
    usage = "polyattn run [options] SCRIPT [ARGS] | -m MODULE [ARGS] | --from-record FILE"
    made = parser("run", SUMMARY, usage=usage)
    add_request(made)
    made.add_argument(
        "--record", metavar="FILE", help="write the problems, for later reports and for tuning"
    )
    made.add_argument(
        "--from-record", metavar="FILE", help="run nothing: report on what --record FILE wrote"
    )
    made.add_argument(
        "--gains",
        nargs="?",
        const=_GAINS_S,
        type=number("seconds", 1),
        metavar="SECONDS",
        help="then time the problems against stock torch, for about this long (--gains=SECONDS, "
        f"default {_GAINS_S:g}), the most work first",
    )
    made.add_argument("--html", metavar="FILE", help="write the report as a page, too")
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


def record_program(program: Sequence[str], options: argparse.Namespace) -> tuple[int, Record]:
    """Run a program with everything recorded; returns its exit code and the record."""
    from polyattn.integrations.program.run_folder import Asked, run_folder
    from polyattn.selection.requests import Request

    Request.make(options.backend, options.never, options.on_unsupported)  # misspelt names fail here
    asked = Asked(tuple(options.backend), tuple(options.never), options.on_unsupported)
    with run_folder(asked, program) as folder:
        code = run_supervised(program, folder.environment())
        return code, folder.record(program)


def measured(record: Record, limit_s: float) -> Record:
    """Return the record with the gains of its cases; Ctrl-C keeps what is done."""
    from polyattn.cli.progress import progress_bar
    from polyattn.measure.gains import gains_of, machine

    gains = []
    with progress_bar("gains") as report:
        try:
            for gain in gains_of(record.cases, record.processes, limit_s=limit_s, progress=report):
                gains.append(gain)
        except KeyboardInterrupt:
            print("interrupted: the gains measured so far are reported", file=sys.stderr)
    return dataclasses.replace(record, gains=gains, machine=machine())


def _check_outputs(options: argparse.Namespace) -> None:
    """Raise before anything runs where an output could not be written afterwards."""
    check_output("--json", options.json)
    check_output("--record", options.record)
    check_output("--html", options.html, makes_folders=True)
    if options.html:
        from polyattn.report.program.program_page import check_page

        check_page(options.html)


def _stored(options: argparse.Namespace, program: list[str]) -> Record:
    from polyattn.integrations.program.record_file import read_record

    if program or options.backend or options.never or options.on_unsupported:
        what = "a program" if program else "a request for backends"
        raise PolyattnError(f"got --from-record and {what}, expected one of them.")
    return read_record(options.from_record)


def _report(record: Record, code: int, options: argparse.Namespace) -> bool:
    """Give each output that was asked for, whatever becomes of the others; say if all are."""
    whole = True
    for write in (_say, _keep, _draw):
        try:
            write(record, code, options)
        except PolyattnError as error:
            print(f"polyattn run: {error}", file=sys.stderr)
            whole = False
    return whole


def _say(record: Record, code: int, options: argparse.Namespace) -> None:
    from polyattn.report.program import lines, to_dict

    if options.json:
        from polyattn.cli.printing import emit_json

        emit_json({"exit_code": code, **to_dict(record)}, options.json)
        return
    columns = shutil.get_terminal_size((_WIDTH, 24)).columns
    rank = _rank()
    print("", *rank, *lines(record, min(columns, _WIDTH)), sep="\n", file=sys.stderr)


def _keep(record: Record, code: int, options: argparse.Namespace) -> None:
    if options.record:
        from polyattn.integrations.program.record_file import write_record

        write_record(record, options.record)
        print(f"record: {options.record} ({len(record.cases)} cases)", file=sys.stderr)


def _draw(record: Record, code: int, options: argparse.Namespace) -> None:
    if options.html:
        from polyattn.report.program import write_page

        print(f"page: {write_page(record, options.html)}", file=sys.stderr)


def _rank() -> list[str]:
    """Say which rank this is where each rank was started by a `polyattn run` of its own."""
    from polyattn import settings

    rank = settings.variable("RANK")
    return [] if rank is None else [f"rank {rank}:"]
