"""What people see of a run of ``bench programs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from polyattn.bench.report import conditions, console, say

__all__ = ["print_record"]

_LEGEND = (
    "x stock: the library's own default over ours, median of the rounds: above 1, polyattn is "
    "faster. x best: the quickest of what else the library offers over ours. ±: half the interval "
    "in which the median lies (95 %), or by which stock differs from itself if that is more; a "
    "goal is met if it is within it. Rounds are added until that is 2 %, or a minute has passed."
)


def print_record(record: Mapping[str, Any]) -> None:
    """Print the table, what could not run or was wrong, and what was missed."""
    table = Table(title=f"whole programs, {record['rounds']} rounds and more")
    for name in ("program", "stock", "stock s", "x stock", "x best", "±", "goal", "met", "ran"):
        table.add_column(name, justify="left" if name in ("program", "stock", "ran") else "right")
    for row in record["rows"]:
        table.add_row(*_cells(row))
    console(width=118).print(table)
    for line in (_LEGEND, *_notes(record), conditions(record), _missed(record)):
        say(line)


def _cells(row: Mapping[str, Any]) -> list[str]:
    goal = f"{row['goal']:g}" + (f", {row['goal_best']:g}" if row["goal_best"] else "")
    ran = ", ".join(f"{name} {calls}" for name, calls in row["ran"].items()) or "no call"
    if row["ratio"] is None:
        return [row["name"], row["stock"], "", "", "", "", goal, "failed", ran]
    met = {True: "yes", False: "no", None: "noisy"}[row["met"]]
    return [
        row["name"], row["stock"], f"{row['seconds'][row['stock']]:.3f}",
        f"{row['ratio']['median']:.2f}", f"{row['over_best']:.2f}" if row["others"] else "",
        "" if row["noise"] is None else f"{row['noise']:.1%}", goal,
        "WRONG" if row["wrong"] else met, ran,
    ]  # fmt: skip


def _notes(record: Mapping[str, Any]) -> list[str]:
    lines = []
    for row in record["rows"]:
        lines += [f"{row['name']}: {side} cannot run: {why}" for side, why in row["cannot"].items()]
        if row.get("wrong"):
            lines.append(f"{row['name']}: wrong: {row['wrong']}")
    busiest = max((row["foreign"] for row in record["rows"]), default=0.0)
    return [*lines, f"others took up to {busiest:.0%} of the machine"]


def _missed(record: Mapping[str, Any]) -> str:
    missed = [row["name"] for row in record["rows"] if row["met"] is False]
    noisy = [row["name"] for row in record["rows"] if row["met"] is None]
    told = f"goals missed: {', '.join(missed)}" if missed else "no goal missed"
    return f"{told}; cannot be judged: {', '.join(noisy)}" if noisy else told
