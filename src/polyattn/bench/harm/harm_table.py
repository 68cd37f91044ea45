"""What people see of a run of ``bench harm``: the worst first, what was chosen there, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from polyattn.bench.report import conditions, console, say

__all__ = ["print_record"]

_SHOWN = 16
_COLUMNS = ("problem", "torch ms", "ours ms", "x torch", "min..max", "x native", "call", "chosen")
_LEFT = ("problem", "call", "chosen")
_LEGEND = (
    "x torch: torch's time over ours, of the slower of our calls: the drop-in with the program's "
    "own arguments, or attention() with the mask as a value. x native: the same for native_cpu, "
    "whatever was chosen. Medians of interleaved repeats, by wall time."
)


def print_record(record: Mapping[str, Any]) -> None:
    """Print the worst rows, the reasons for what was chosen there, and the verdict."""
    rows = sorted(record["rows"], key=lambda row: row["ratio"]["median"])
    shown = rows[: max(_SHOWN, len(record["harmed"]) + len(record["too_loud"]))]
    table = Table(title=f"the worst of {len(rows)} problems, {record['threads']} threads")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in _LEFT else "right", overflow="fold")
    for row in shown:
        ratio = row["ratio"]
        table.add_row(
            row["name"],
            _short(row["torch_ms"]["median"]),
            _short(row["ours_ms"]["median"]),
            _short(ratio["median"]),
            f"{_short(ratio['min'])}..{_short(ratio['max'])}",
            _short(row["native_ratio"]["median"]) if row["native_ratio"] else "-",
            row["call"],
            row["chosen"],
        )
    console().print(table)
    for line in (_LEGEND, *_reasons(shown), *_verdict(record), _conditions(record)):
        say(line)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _reasons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say once each why a backend was chosen in these rows."""
    found = {(row["chosen"], row["chosen_by"], row["reason"]): None for row in rows}
    return [f"{chosen}  <- {source}: {reason}" for chosen, source, reason in found]


def _verdict(record: Mapping[str, Any]) -> list[str]:
    rows = {row["name"]: row for row in record["rows"]}
    lines = [
        f"geometric mean of all: {record['mean_ratio']:.2f} x torch"
        + (f", native_cpu {record['native_mean_ratio']:.2f}" if record["native_mean_ratio"] else "")
    ]
    lines += [f"{name}: wrong result: {rows[name]['wrong']}" for name in record["wrong"]]
    if record["too_loud"]:
        lines.append(
            "slower, but others were too busy to say: "
            + _listed(rows[name] for name in record["too_loud"])
        )
    if record["harmed"]:
        harmed = _listed(rows[name] for name in record["harmed"])
        return [*lines, f"harm (below {record['least']:g}): {harmed}"]
    worst = f"the worst is {record['worst']['ratio']:.2f}, {record['worst']['name']}"
    return [*lines, worst if record["too_loud"] else f"no harm: {worst}"]


def _listed(rows: Any) -> str:
    ordered = sorted(rows, key=lambda row: row["ratio"]["median"])
    return "; ".join(f"{row['name']} {row['ratio']['median']:.2f}" for row in ordered)


def _conditions(record: Mapping[str, Any]) -> str:
    loudest = max(row["foreign"]["median"] for row in record["rows"])
    return (
        f"{conditions(record)}; {record['took_s']} s, with {record['times']}; others took at most "
        f"{loudest:.0%} of the machine in the median repeat of a row"
    )
