"""The command ``polyattn bench programs``: its options, its record, and its exit code."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from polyattn.errors import PolyattnError

__all__ = ["add", "run"]

_ROUNDS, _ROUNDS_QUICK, _LEAST_ROUNDS = 7, 2, 2
_CODES = {True: 0, False: 1, None: 2}
_INTERRUPTED = 130


def add(kinds: Any) -> None:
    """Add the command to those of ``polyattn bench``."""
    programs = kinds.add_parser(
        "programs",
        help="whole models and a training step, stock default beside polyattn",
        description="Whole-model time of transformers, diffusers and plain torch: the library's "
        "default, what else it offers, and polyattn, in turns.",
    )
    programs.add_argument("--quick", action="store_true", help="two rounds; not for a record")
    programs.add_argument("--only", metavar="PATTERN", default="", help="a part of the rows' names")
    programs.add_argument("--rounds", type=int, help=f"that are timed ({_ROUNDS}; quick: 2)")
    programs.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    programs.add_argument("--json", action="store_true", help="print the record, not the table")
    programs.add_argument(
        "--record",
        metavar="FILE",
        nargs="?",
        const="",
        help="write the record; without FILE to benchmarks/results/<machine>/programs.json",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return 0 if all goals are met, 1 if not, 2 if it cannot be said."""
    rounds = options.rounds or (_ROUNDS_QUICK if options.quick else _ROUNDS)
    if rounds < _LEAST_ROUNDS or (options.rounds is not None and options.rounds < _LEAST_ROUNDS):
        raise PolyattnError(f"got --rounds {options.rounds}, expected at least {_LEAST_ROUNDS}.")
    if options.record == "" and (options.quick or options.only or options.rounds):
        raise PolyattnError(
            "got --record without FILE beside --quick, --only or --rounds, expected a whole run "
            "for the record of the machine; name a FILE."
        )
    from polyattn.bench.programs.program_rows import chosen
    from polyattn.bench.programs.whole_programs import Options, measure
    from polyattn.bench.report import say

    asked = Options(chosen(options.only), rounds, options.seed, options.quick)
    record = measure(asked, lambda line: say(line, error=True))
    _tell(record, options)
    if record["interrupted"]:
        say("interrupted: these are the rows that were measured, not written", error=True)
        return _INTERRUPTED
    return _CODES[record["goals_met"]]


def _tell(record: dict[str, Any], options: argparse.Namespace) -> None:
    from polyattn.bench import records
    from polyattn.bench.programs.programs_table import print_record
    from polyattn.bench.report import say

    if options.json:
        say(records.dump(record), plain=True)
    else:
        print_record(record)
    if options.record is not None and not record["interrupted"]:
        path = Path(options.record or records.default_path(record, "programs"))
        records.write(record, path)
        say(f"record: {path}", error=options.json)
