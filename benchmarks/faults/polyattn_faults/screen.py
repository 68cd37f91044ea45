"""What people see of the faults: who was named, by architecture and by kind, and every miss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from polyattn.bench.report import conditions, console, say

__all__ = ["table"]

_COLUMNS = ("seeded", "exact", "other", "missed", "cannot say", "no effect", "crashed")
_LEGEND = (
    "exact: the module whose own code or weight is wrong is named; other: another one; missed: "
    "said to be the same. Without effect, and not counted as seeded: what changes neither the "
    "module's own results nor the model's by more than rounding. Crashed: the bug ends the run."
)


def table(record: Mapping[str, Any]) -> None:
    """Print the tables of a record."""
    rows = [row for row in record["rows"] if row.get("part") == "faults"]
    for dtype, sums in record["faults"]["sums"].items():
        own = [row for row in rows if row["dtype"] == dtype]
        how = "traces of free runs" if dtype == "float32" else "isolate, module by module"
        seeded = [row for row in own if not row.get("clean")]
        _print(f"{dtype} ({how}), by architecture", seeded, "architecture")
        _print(f"{dtype}, by kind", seeded, "kind")
        _print_clean(dtype, [row for row in own if row.get("clean")])
        for line in _footer(dtype, sums, record, own):
            say(line)
    say(_LEGEND)
    say(conditions(record))


def _print(title: str, rows: Sequence[Mapping[str, Any]], by: str) -> None:
    shown = Table(title=title)
    shown.add_column(by)
    for name in _COLUMNS:
        shown.add_column(name, justify="right")
    for value in dict.fromkeys(row[by] for row in rows):
        shown.add_row(value, *_counts([row for row in rows if row[by] == value]))
    shown.add_row("all", *_counts(rows), style="bold")
    console().print(shown)


def _counts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    counted = [row for row in rows if row.get("counted")]
    found = [len(counted)]
    found += [sum(row["outcome"] == name for row in counted) for name in _COLUMNS[1:5]]
    found.append(sum(row.get("counted") is False for row in rows))
    found.append(sum(row["outcome"] == "crashed" for row in rows))
    return [str(one) if one else "" for one in found]


def _print_clean(dtype: str, rows: Sequence[Mapping[str, Any]]) -> None:
    shown = Table(title=f"{dtype}, clean ports")
    for name in ("port", "models", "same", "cannot say", "flagged", "modules compared"):
        shown.add_column(name, justify="left" if name == "port" else "right")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        counts = [
            sum(row["outcome"] == name for row in own) for name in ("same", "cannot say", "flagged")
        ]
        share = sum(row["compared"] for row in own) / sum(row["modules"] for row in own)
        numbers = [str(one) if one else "" for one in (len(own), *counts)]
        shown.add_row(kind, *numbers, f"{share:.0%}")
    console().print(shown)


def _footer(
    dtype: str, sums: Mapping[str, Any], record: Mapping[str, Any], rows: Sequence[Any]
) -> list[str]:
    goal = record["faults"]["goals"][dtype]
    result = (
        f"{dtype}: {sums['exact']} of {sums['seeded']} bugs of {sums['kinds']} kinds "
        f"({sums['renamed']} in renamed ports) named exactly, {sums['share']:.1%} (goal "
        f"{goal:.0%}); {sums['flagged']} of {sums['clean']} clean ports flagged (goal 0): "
        f"{'met' if sums['met'] else 'MISSED'}"
    )
    wrong = [row for row in rows if row.get("counted") and row["outcome"] != "exact"]
    wrong += [row for row in rows if row.get("clean") and row["outcome"] != "same"]
    shown = rows if record["verbose"] else wrong
    return [result] + [f"  {row['name']}: {row['outcome']}: {row['said']}" for row in shown]
