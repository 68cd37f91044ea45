"""What people see of a run of ``bench jax``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from polyattn.bench.report import conditions, console, say

__all__ = ["print_record"]

_COLUMNS = ("case", "ours ms", "jax.nn ms", "x jax.nn", "min..max", "goal", "met", "over torch")
_LEGEND = (
    "x jax.nn: time of jax.nn.dot_product_attention over ours, both under jit; over torch: ours "
    "under jit over the same call from torch on the same kernel. Medians of interleaved repeats."
)


def print_record(record: Mapping[str, Any]) -> None:
    """Print the rows, memory, tracing, and the verdict."""
    others = sorted({name for row in record["rows"] for name in row["others_ms"]})
    table = Table(title=f"polyattn.jax.attention and jax.nn, {record['threads']} threads")
    for name in (*_COLUMNS, *(f"{other} ms" for other in others), "chosen"):
        left = name in ("case", "chosen")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    for row in record["rows"]:
        table.add_row(*_cells(row), *(_other(row, name) for name in others), row["chosen"])
    console(width=150).print(table)
    for line in (_LEGEND, *_memory(record), *_tracing(record), *_taps(record), *_verdict(record)):
        say(line)


def _cells(row: Mapping[str, Any]) -> list[str]:
    ratio, border = row["ratio"], row["over_torch"]
    return [
        row["name"],
        _short(row["ours_ms"]["median"]),
        _short(row["stock_ms"]["median"]),
        _short(ratio["median"]),
        f"{_short(ratio['min'])}..{_short(ratio['max'])}",
        "" if row["goal"] is None else f"{row['goal']:g}",
        "yes" if row["met"] else "no",
        "" if border is None else _short(border["median"]),
    ]


def _other(row: Mapping[str, Any], name: str) -> str:
    found = row["others_ms"].get(name)
    return "-" if found is None else _short(found["median"])


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _memory(record: Mapping[str, Any]) -> list[str]:
    found = [
        f"{row['name']} {row['mib'][0]:g} -> {row['mib'][1]:g} MiB"
        + (f" (x {row['grows']:g})" if row["grows"] else "")
        for row in record["memory"]
    ]
    what = "memory of a call at twice the length (x 2 is O(T), x 4 O(T^2)): "
    return [what + "; ".join(found)] if found else []


def _tracing(record: Mapping[str, Any]) -> list[str]:
    told = record["tracing"]
    if told is None:
        return []
    line = (
        f"choosing while tracing: {told['choice_ms']:g} ms for a problem that is new (goal "
        f"{told['goal_ms']:g}); tracing a known one takes {told['known_ms']:g} ms"
    )
    return [line]


def _taps(record: Mapping[str, Any]) -> list[str]:
    told = record.get("taps")
    if told is None:
        return []
    line = (
        f"a tap of a trace: {told['small_us']:g} us for 256 numbers until its record is written "
        f"(goal {told['goal_us']:g}), {told['large_us']:g} us for a million"
    )
    return [line]


def _verdict(record: Mapping[str, Any]) -> list[str]:
    lines = [f"{row['name']}: wrong: {row['wrong']}" for row in record["rows"] if row["wrong"]]
    lines.append(conditions(record))
    if record["goals_met"] is None:
        return [*lines, "a quick run: goals are for the whole sizes"]
    missed = [row["name"] for row in record["rows"] if not row["met"]]
    return [*lines, f"goals missed: {', '.join(missed)}" if missed else "all goals met"]
