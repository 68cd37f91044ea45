"""``polyattn trace diff``: which module of a port is the first that is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from polyattn.cli.arguments import parser
from polyattn.cli.trace_table import separate
from polyattn.cli.trace_verdict import add_options, report, rules_of, tolerance_of
from polyattn.errors import TraceError

__all__ = ["main"]

SUMMARY = """Which module of B is the first that is wrong, A being right: two traces, or folders
or patterns of the files of several ranks. Modules are aligned by the rules given, names, weights
and order. Exit code 0: the same, 1: different, 2: cannot say, and why. No framework is imported."""


def main(argv: Sequence[str]) -> int:
    """Compare two traces; returns 0, 1 or 2."""
    options = _parser().parse_args(separate(argv))
    rules, tolerance = rules_of(options), tolerance_of(options.tolerance)
    from polyattn.trace.compare import compare

    verdict = compare(
        options.a,
        options.b,
        rules=rules,
        floor=options.floor,
        tolerance=tolerance,
        reruns=_reruns(options),
    )
    report(verdict, options, options.a, options.b)
    return verdict.exit_code


def _parser() -> argparse.ArgumentParser:
    made = parser("trace diff", SUMMARY)
    made.add_argument("a", metavar="A", help="the reference's trace")
    made.add_argument("b", metavar="B", help="the port's trace")
    made.add_argument(
        "--floor", metavar="FILE", help="of `polyattn trace calibrate`: errors that mean nothing"
    )
    for side in "ab":
        made.add_argument(
            f"--reruns-of-{side}",
            action="extend",
            nargs="+",
            default=[],
            metavar="FILE",
            help=f"traces of {side.upper()}'s program run again unchanged: whether "
            "it repeats itself, and no error below what it does not "
            "counts; after A and B",
        )
    add_options(made)
    return made


def _reruns(options: argparse.Namespace) -> dict[str, list[str]] | None:
    """The runs of each side again; one that is the side itself would agree with it always."""
    found: dict[str, list[str]] = {}
    for side, given, own in (
        ("a", options.reruns_of_a, options.a),
        ("b", options.reruns_of_b, options.b),
    ):
        seen = {str(Path(own).resolve())}
        for path in given:
            if str(Path(path).resolve()) in seen:
                raise TraceError(
                    f"got --reruns-of-{side} {path} twice, or as {side.upper()} itself, expected "
                    "the trace of another run each."
                )
            seen.add(str(Path(path).resolve()))
        if given:
            found[side] = given
    return found or None
