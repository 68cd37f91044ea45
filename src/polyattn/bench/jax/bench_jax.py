"""The command ``polyattn bench jax``: its options, its record, its exit code."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from polyattn.errors import MissingDependency, PolyattnError

__all__ = ["add", "run"]

_CODES = {True: 0, False: 1, None: 2}


def add(kinds: Any) -> None:
    """Add the command to those of ``polyattn bench``."""
    jax = kinds.add_parser(
        "jax",
        help="JAX's calls beside jax.nn.dot_product_attention",
        description="polyattn.jax.attention and jax.nn under jit in one run, with goals.",
    )
    jax.add_argument("--quick", action="store_true", help="an eighth of the lengths, no goals")
    jax.add_argument("--only", metavar="PATTERN", default="", help="a part of the cases' names")
    jax.add_argument("--repeats", type=int, help="repeats that are kept (5; quick: 3)")
    jax.add_argument("--json", action="store_true", help="print the record, not the table")
    jax.add_argument(
        "--record",
        metavar="FILE",
        nargs="?",
        const="",
        help="write the record; without FILE to benchmarks/results/<machine>/jax.json",
    )
    jax.add_argument("--plot", metavar="FILE.png", help="draw the ratios (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return 0 if all goals are met, 1 if not, 2 if it cannot be said."""
    if options.repeats is not None and options.repeats < 2:
        raise PolyattnError(f"got --repeats {options.repeats}, expected at least 2.")
    if options.record == "" and (options.quick or options.only):
        raise PolyattnError(
            "got --record without FILE beside --quick or --only, expected a whole run for the "
            "record of the machine; name a FILE."
        )
    for package in ("jax", "torch"):  # torch's call on the same kernel is timed beside
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(
                f"got `bench jax` without {package}, expected both: "
                "pip install 'polyattn[jax,torch]'"
            )
    from polyattn.bench.conclude import conclude
    from polyattn.bench.jax import jax_table as report
    from polyattn.bench.jax.jax_run import measure
    from polyattn.bench.report import say

    record = measure(
        only=options.only,
        quick=options.quick,
        repeats=options.repeats or (3 if options.quick else 5),
        say=lambda line: say(line, error=True),
    )
    conclude(options, record, "jax", report.print_record)
    return _CODES[record["goals_met"]]
