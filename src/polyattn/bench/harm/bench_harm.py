"""The command ``polyattn bench harm``: its options, its record, its exit code."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping
from typing import Any

from polyattn.errors import MissingDependency, PolyattnError

__all__ = ["add", "run"]

YES, NO, CANNOT_SAY, INTERRUPTED = 0, 1, 2, 130
_MOST_BARS = 40


def add(kinds: Any) -> None:
    """Add the command to those of ``polyattn bench``."""
    harm = kinds.add_parser(
        "harm",
        help="whether the automatic choice is ever slower than torch's own function",
        description="Ordinary problems as programs call them: torch's own function and polyattn's "
        "choice in one run. Exit code 1 if any is slower by more than 5 %, or wrong.",
    )
    harm.add_argument("--quick", action="store_true", help="a tenth of the problems, in a minute")
    harm.add_argument("--only", metavar="PATTERN", default="", help="a part of the problems' names")
    harm.add_argument("--tuned", action="store_true", help="with the times tuned on this machine")
    harm.add_argument("--json", action="store_true", help="print the record, not the table")
    harm.add_argument(
        "--record",
        metavar="FILE",
        nargs="?",
        const="",
        help="write the record; without FILE to benchmarks/results/<machine>/harm.json",
    )
    harm.add_argument("--plot", metavar="FILE.png", help="draw the worst (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return 0 for no harm, 1 for harm, 2 for no answer, 130 on Ctrl-C."""
    if options.record == "" and (options.quick or options.only or options.tuned):
        raise PolyattnError(
            "got --record without FILE beside --quick, --only or --tuned, expected a whole untuned "
            "run for the record of the machine; name a FILE."
        )
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(
            "got `bench harm` without PyTorch, expected torch: pip install 'polyattn[torch]'"
        )
    from polyattn.bench.conclude import conclude
    from polyattn.bench.harm import harm_table as report
    from polyattn.bench.harm.whole_run import measure
    from polyattn.bench.report import say

    record = measure(
        only=options.only,
        quick=options.quick,
        tuned=options.tuned,
        say=lambda line: say(line, error=True),
    )
    conclude(options, record, "harm", report.print_record, _worst)
    if record["interrupted"]:
        return INTERRUPTED
    return {True: YES, False: NO, None: CANNOT_SAY}[record["goals_met"]]


def _worst(record: Mapping[str, Any]) -> Mapping[str, Any]:
    rows = sorted(record["rows"], key=lambda row: row["ratio"]["median"])
    return {**record, "rows": rows[:_MOST_BARS]}
