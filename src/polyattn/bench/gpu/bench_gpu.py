"""The command ``polyattn bench gpu``: its options, its record, its exit code."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from polyattn.errors import MissingDependency, PolyattnError

__all__ = ["add", "run"]

YES, NO = 0, 1


def add(kinds: Any) -> None:
    """Add the command to those of ``polyattn bench``."""
    gpu = kinds.add_parser(
        "gpu",
        help="torch's own function, our choice and each backend on a CUDA device",
        description="What models call attention with: torch's own function, polyattn's choice and "
        "each backend in one run. Exit code 1 if the choice is slower by more than 5 %, or wrong.",
    )
    gpu.add_argument("--quick", action="store_true", help="an eighth of the lengths")
    gpu.add_argument("--only", metavar="PATTERN", default="", help="a part of the cases' names")
    gpu.add_argument("--tuned", action="store_true", help="with the times tuned on this machine")
    gpu.add_argument("--repeats", type=int, default=5, help="repeats that are kept (5)")
    gpu.add_argument("--json", action="store_true", help="print the record, not the table")
    gpu.add_argument(
        "--record",
        metavar="FILE",
        nargs="?",
        const="",
        help="write the record; without FILE to benchmarks/results/<device>/gpu.json",
    )
    gpu.add_argument("--plot", metavar="FILE.png", help="draw the ratios (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return 0 for no harm, 1 for harm."""
    if options.record == "" and (options.quick or options.only or options.tuned):
        raise PolyattnError(
            "got --record without FILE beside --quick, --only or --tuned, expected a whole untuned "
            "run for the record of the device; name a FILE."
        )
    if options.repeats < 1:
        raise PolyattnError(f"got --repeats {options.repeats}, expected 1 or more.")
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(
            "got `bench gpu` without PyTorch, expected torch: pip install 'polyattn[torch]'"
        )
    from polyattn.bench.conclude import conclude
    from polyattn.bench.gpu import gpu_run, gpu_table
    from polyattn.bench.report import say

    record = gpu_run.measure(
        only=options.only, quick=options.quick, tuned=options.tuned, repeats=options.repeats,
        say=lambda line: say(line, error=True),
    )  # fmt: skip
    conclude(options, record, "gpu", gpu_table.print_record)
    return YES if record["goals_met"] else NO
