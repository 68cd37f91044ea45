"""What the commands that end in a verdict have in common: their options, and its printing."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.text import Text

from polyattn.cli.printing import console, emit_json, note
from polyattn.cli.trace_table import print_table, printable
from polyattn.errors import TraceError

if TYPE_CHECKING:
    from polyattn.trace.compare import Row, Verdict

__all__ = ["add_options", "report", "rules_of", "tolerance_of"]


def add_options(made: argparse.ArgumentParser) -> None:
    """Add which module is which, what is accepted, and how much is printed."""
    made.add_argument(
        "--rules",
        metavar="FILE.json",
        help="which module is which: an object of REGEX: REPLACEMENT",
    )
    made.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="REGEX=REPLACEMENT",
        help=r"one such rule, as '^h\.(\d+)=blocks.\1'; may be repeated, the first "
        "that fits wins",
    )
    made.add_argument(
        "--tolerance",
        action="append",
        default=[],
        metavar="X|PATTERN=X",
        help="a relative error to accept, everywhere or where a module's name has "
        "PATTERN in it; may be repeated",
    )
    made.add_argument(
        "--html",
        metavar="FILE",
        help="also a page for a browser: the error's growth, layers, steps, calls",
    )
    made.add_argument("--all", action="store_true", help="every row of the table")


def rules_of(options: argparse.Namespace) -> list[tuple[str, str]] | None:
    """Return the rules of the command line before those of the file."""
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


def tolerance_of(given: Sequence[str]) -> dict[str, float] | None:
    """Return them by pattern, and the one for everywhere last: the first that fits counts."""
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


def report(
    verdict: Verdict,
    options: argparse.Namespace,
    a: str,
    b: str,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print a verdict, as JSON with `more` if the options say so, and write its page.

    `a` and `b`: the traces, for what is said of them. Raises TraceError for a page that cannot be
    written, after the report.
    """
    failed = _page(verdict, options.html) if options.html is not None else None
    if options.json:
        emit_json(verdict.to_dict() | dict(more or {}), options.json)
    else:
        _print(verdict, options.all, a, b)
    if failed is not None:
        raise failed


def _page(verdict: Verdict, path: str) -> TraceError | None:
    """Write the page, before the report: `| head` may end that. An error waits for the report."""
    from polyattn.report.verdict import write_page

    try:
        note(f"page: {write_page(verdict, path)}")
    except TraceError as error:
        return error
    return None


def _print(verdict: Verdict, every: bool, a: str, b: str) -> None:
    out = console()
    shown = replace(verdict, rows=()) if every else verdict
    first, _, rest = str(shown).partition("\n")
    style = {True: "bold green", False: "bold red", None: "bold yellow"}[verdict.equal]
    out.print(Text(printable(first), style=style), soft_wrap=True)
    for line in rest.split("\n"):
        out.print(Text(printable(line)), soft_wrap=True)
    if verdict.guards["flags"].holds is False:
        out.print(f"all flags: polyattn flags diff {a} {b}", markup=False, soft_wrap=True)
    if every:
        columns = (
            "module*", "in the reference*", "class", "step>", "call>", "in>", "out>", "added>",
            "threshold>", "verdict", "by", "note*",
        )  # fmt: skip
        out.print()
        styles = [_STYLES.get(row.verdict, "") for row in verdict.rows]
        print_table(out, columns, map(_cells, verdict.rows), styles)


_STYLES = {"culprit": "bold red", "differs": "red", "cannot say": "yellow"}


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
