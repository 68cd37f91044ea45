"""What people see of a record: tables, with the goal beside each figure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from polyattn.outputs import PipedConsole

__all__ = ["conditions", "console", "print_comparison", "print_overhead", "say"]

PLAIN_WIDTH = 118


def console(error: bool = False, width: int = 0) -> Console:
    """Return where to print: as wide as the terminal, and at least `width` where there is none."""
    stream = sys.stderr if error else sys.stdout
    plain = max(width, PLAIN_WIDTH)
    return PipedConsole(file=stream, width=None if stream.isatty() else plain, highlight=False)


def say(text: str, *, error: bool = False, plain: bool = False) -> None:
    """Print a line; `plain` text is for programs and is not wrapped."""
    console(error).print(text, markup=False, soft_wrap=plain or error)


def print_overhead(record: Mapping[str, Any]) -> None:
    """Print the table of ``bench overhead``."""
    table = Table(title=f"extra time of a call at {record['shape']}, {record['threads']} thread")
    for name in ("call", "median us", "q1..q3", "min..max", "goal us", "met", "over (us)"):
        table.add_column(name, justify="right" if name.endswith("us") else "left", overflow="fold")
    for row in record["rows"]:
        if row.get("missing"):
            table.add_row(row["name"], "-", "", "", "", "", f"not installed: {row['missing']}")
            continue
        extra, goal = row["extra_us"], row["goal_us"]
        met = "" if goal is None else "yes" if row["met"] else "no"
        table.add_row(
            row["name"],
            f"{extra['median']:.2f}",
            f"{extra['q1']:.2f}..{extra['q3']:.2f}",
            f"{extra['min']:.2f}..{extra['max']:.2f}",
            "" if goal is None else f"{goal:.1f}",
            met,
            f"{row['over']} ({row['over_us']:.2f})",
        )
    console().print(table)
    for line in _footer(record):
        say(line)
    _print_in_programs(record["in_programs"])


def _print_in_programs(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what calls take between the layers of a small decoder."""
    table = Table(title="a call between the layers of a small decoder, all threads")
    for name in ("call", "torch us", "drop-in us", "torch / ours", "q1..q3", "ran"):
        table.add_column(name, justify="left" if name in ("call", "ran") else "right")
    for row in rows:
        ratio = row["ratio"]
        table.add_row(
            row["name"],
            f"{row['torch_us']:.1f}",
            f"{row['ours_us']:.1f}",
            f"{ratio['median']:.2f}",
            f"{ratio['q1']:.2f}..{ratio['q3']:.2f}",
            row["ran"],
        )
    console().print(table)
    say(
        "each call is timed alone, after layers whose weights fill the second cache; torch's "
        "function and polyattn's by turns, medians."
    )


def _footer(record: Mapping[str, Any]) -> list[str]:
    load = record["foreign_load"]
    over = (
        "over: the very kernel call that the row ends in, timed beside it; each figure is a median "
        "of paired differences."
    )
    rounds = (
        f"{record['rounds']} rounds of {record['pairs_per_round']} pairs, "
        f"{record['dropped_rounds']} more dropped because others were busy; others took "
        f"{load['median']:.0%} of the machine in the median round kept, {load['max']:.0%} in the "
        "busiest."
    )
    lines = [
        over,
        *(f"{name} = {meaning}" for name, meaning in record["legend"].items()),
        rounds,
        conditions(record),
    ]
    missed = [row["name"] for row in record["rows"] if row.get("met") is False]
    lines.append("all goals met" if not missed else f"goals missed: {', '.join(missed)}")
    return lines


def conditions(record: Mapping[str, Any]) -> str:
    """Return the machine and the versions in one line."""
    machine = record["machine"]
    native = record.get("native")
    isa = f", native {native['isa']}" if native else ""
    versions = ", ".join(f"{name} {found}" for name, found in record["versions"].items() if found)
    device = f"{machine['accelerator']}, " if "accelerator" in machine else ""
    return f"{device}{machine['cpu']}, {machine['cores']} cores{isa}; {versions}"


def print_comparison(comparison: Mapping[str, Any], a: str, b: str) -> None:
    """Print two records side by side."""
    table = Table(title=f"{a} and {b}: {comparison['measure']}")
    for name in ("call", "a", "b", "change", ""):
        table.add_column(name, justify="left" if name in ("call", "") else "right")
    for row in comparison["rows"]:
        table.add_row(
            row["name"],
            f"{row['a']:.3g}",
            f"{row['b']:.3g}",
            f"{row['change']:+.3g}",
            row["verdict"],
        )
    console().print(table)
    for note in comparison["notes"]:
        say(f"note: {note}")
    slower = comparison["slower"]
    say(f"slower beyond both quartiles: {', '.join(slower)}" if slower else "nothing is slower")
