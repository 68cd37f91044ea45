"""What people see of a run of ``bench generate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from polyattn.bench.report import conditions, console, say

__all__ = ["print_record"]

_LEFT = ("row", "met", "ran")
_LEGEND = (
    "x: stock's time for a token over ours, median of the blocks, by the clock and by the "
    "processor time of all threads; a goal is met if it is within ±, by which stock differs from "
    "itself. run: x as routed by `polyattn run`, which records each call. prefill: x, once. "
    "attention: its share of stock's token."
)


def print_record(record: Mapping[str, Any]) -> None:
    """Print the table, what disagreed, and what was missed."""
    threads = " or ".join(sorted({str(r["threads"]) for r in record["rows"] if "threads" in r}))
    table = Table(
        title=f"{record['tokens']} tokens, lengths of the keys {record['lengths']}, "
        f"{threads or 'no'} threads"
    )
    columns = (
        "row", "token ms", "x wall", "±", "x cpu", "±", "goal", "met", "run", "prefill",
        "attention", "ran",
    )  # fmt: skip
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right")
    for row in record["rows"]:
        table.add_row(*_cells(row))
    console(width=140).print(table)
    for line in (_LEGEND, *_disagreements(record), *_footer(record)):
        say(line)


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "failed" in row:
        side = row["failed"]["side"]
        return [row["name"], *[""] * 5, f"{row['goal']:g}", f"{side} failed", *[""] * 4]
    cells = [row["name"], f"{row['token_ms']['stock']['wall']:.2f}"]
    for clock in ("wall", "processor"):
        cells += [f"{row['ratio'][clock]['median']:.3f}", f"{row['noise'][clock]:.1%}"]
    share, run = row["attention_share"], row["as_run"]
    return [
        *cells,
        f"{row['goal']:g}",
        _met(row),
        f"{run['wall']['median']:.3f}" if run else "",
        f"{row['prefill']['wall']['ratio']:.2f}",
        "" if share is None else f"{share:.0%}",
        _ran(row["ran"]),
    ]


def _met(row: Mapping[str, Any]) -> str:
    if row["agreement"]["wrong"]:
        return "WRONG"
    return {True: "yes", False: "no", None: "noisy"}[row["met"]]


def _ran(ran: Mapping[str, int] | None) -> str:
    if ran is None:
        return "(compiled)"
    return ", ".join(f"{name} {calls}" for name, calls in ran.items()) or "no call"


def _disagreements(record: Mapping[str, Any]) -> list[str]:
    lines = []
    for row in record["rows"]:
        if "failed" in row:
            last = row["failed"]["why"].strip().rpartition("\n")[2]
            lines.append(f"{row['name']}: {row['failed']['side']} failed: {last}")
        elif row["agreement"]["wrong"]:
            lines.append(f"{row['name']}: wrong: {row['agreement']['wrong']}")
        elif row["ran"] == {}:
            lines.append(
                f"{row['name']}: makes no call of scaled_dot_product_attention (transformers runs "
                "it in eager attention), so polyattn has no part in it"
            )
    return lines


def _footer(record: Mapping[str, Any]) -> list[str]:
    rows = [row for row in record["rows"] if "failed" not in row]
    lines = [conditions(record)]
    if rows:
        lines.append(f"others took up to {max(row['foreign'] for row in rows):.0%} of the machine")
    for row in rows:
        if row["met"] is False and row["goal"] > 1 and (share := row["attention_share"]):
            most = 1 / (1 - share)
            lines.append(f"{row['name']}: an attention that takes no time would make it {most:.2f}")
    missed = [row["name"] for row in record["rows"] if row["met"] is False]
    noisy = [row["name"] for row in record["rows"] if row["met"] is None]
    if noisy:
        lines.append(f"cannot be judged: {', '.join(noisy)}")
    lines.append(f"goals missed: {', '.join(missed)}" if missed else "no goal missed")
    return lines
