"""``polyattn trace diff``: which module of a port is the first that is wrong."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.text import Text

from polyattn.cli.arguments import parser
from polyattn.cli.printing import console, emit_json
from polyattn.cli.trace_table import print_table, printable, separate
from polyattn.errors import TraceError

if TYPE_CHECKING:
    from polyattn.trace.compare import Row, Verdict

__all__ = ["main"]

SUMMARY = """Which module of B is the first that is wrong, A being right: two traces, or folders
or patterns of the files of several ranks. Modules are aligned by the rules given, names, weights
and order. Exit code 0: the same, 1: different, 2: cannot say, and why. No framework is imported."""


def main(argv: Sequence[str]) -> int:
    """Compare two traces; returns 0, 1 or 2."""
    options = _parser().parse_args(separate(argv))
    rules, tolerance = _rules(options), _tolerance(options.tolerance)
    from polyattn.trace.compare import compare

    verdict = compare(options.a, options.b, rules=rules, floor=options.floor, tolerance=tolerance)
    if options.json:
        emit_json(verdict.to_dict(), options.json)
    else:
        _print(verdict, options)
    return verdict.exit_code


def _parser() -> argparse.ArgumentParser:
    made = parser("trace diff", SUMMARY)
    made.add_argument("a", metavar="A", help="the reference's trace")
    made.add_argument("b", metavar="B", help="the port's trace")
    made.add_argument("--rules", metavar="FILE.json",
                      help="which module is which: an object of REGEX: REPLACEMENT")  # fmt: skip
    made.add_argument("--rename", action="append", default=[], metavar="REGEX=REPLACEMENT",
                      help=r"one such rule, as '^h\.(\d+)=blocks.\1'; may be repeated, the first "
                           "that fits wins")  # fmt: skip
    made.add_argument("--floor", metavar="FILE",
                      help="of `polyattn trace calibrate`: errors that mean nothing")  # fmt: skip
    made.add_argument("--tolerance", action="append", default=[], metavar="X|PATTERN=X",
                      help="a relative error to accept, everywhere or where a module's name has "
                           "PATTERN in it; may be repeated")  # fmt: skip
    made.add_argument("--all", action="store_true", help="every row of the table")
    return made


def _rules(options: argparse.Namespace) -> list[tuple[str, str]] | None:
    """The rules of the command line before those of the file."""
    found = []
    for given in options.rename:
        # the last one: a pattern may have = in it, as in (?=...), and a module's name has none
        pattern, equals, replacement = given.rpartition("=")
        if not equals or not pattern:
            raise TraceError(
                f"got --rename {given!r}, expected REGEX=REPLACEMENT, as '^h\\.=blocks.'."
            )
        found.append((pattern, replacement))
    if options.rules:
        from polyattn.trace.compare import rules

        loaded = rules.parse(options.rules)
        found += [(rule.pattern.pattern, rule.replacement) for rule in loaded]
    return found or None


def _tolerance(given: Sequence[str]) -> dict[str, float] | None:
    """By pattern, and the one for everywhere last: the first that fits counts."""
    found: dict[str, float] = {}
    everywhere: dict[str, float] = {}
    for one in given:
        pattern, equals, text = one.rpartition("=")
        try:
            value = float(text)
            re.compile(pattern)
        except (ValueError, re.error) as error:
            raise TraceError(
                f"got --tolerance {one!r}, expected a number, or PATTERN=NUMBER ({error})."
            ) from error
        (found if equals and pattern else everywhere)[pattern] = value
    return found | everywhere or None


def _print(verdict: Verdict, options: argparse.Namespace) -> None:
    out = console()
    shown = replace(verdict, rows=()) if options.all else verdict
    first, _, rest = str(shown).partition("\n")
    style = {True: "bold green", False: "bold red", None: "bold yellow"}[verdict.equal]
    out.print(Text(printable(first), style=style), soft_wrap=True)
    for line in rest.split("\n"):
        out.print(Text(printable(line)), soft_wrap=True)
    if verdict.guards["flags"].holds is False:
        out.print(f"all flags: polyattn flags diff {options.a} {options.b}",
                  markup=False, soft_wrap=True)  # fmt: skip
    if options.all:
        columns = (
            "module*", "in the reference*", "class", "step>", "call>", "in>", "out>", "added>",
            "threshold>", "verdict", "by", "note*",
        )  # fmt: skip
        out.print()
        styles = [_STYLES.get(row.verdict, "") for row in verdict.rows]
        print_table(out, columns, map(_cells, verdict.rows), styles)


_STYLES = {"culprit": "bold red", "cannot say": "yellow"}


def _cells(row: Row) -> tuple[str, ...]:
    name = "" if row.module is None else row.module or "(model)"
    other = row.reference_module
    known = "" if other is None or other == row.module else other or "(model)"
    phase = " (backward)" if row.phase == "backward" else ""
    return (
        name + phase if name else "", known, row.cls, "" if row.step is None else str(row.step),
        str(row.call), *map(_number, (row.error_in, row.error_out, row.contributed)),
        _number(row.threshold), row.verdict, "" if row.how == "name" else row.how, row.note,
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
