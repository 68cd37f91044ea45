"""What people see of a run of ``bench cpu``: the goals beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from polyattn.bench.cpu.goals import AMX, OTHERS, ZEN4, said
from polyattn.bench.report import conditions, console, say

__all__ = ["print_record"]

_WIDTH, _WIDTH_OF_PEER = 116, 12
_ROUTES = (
    "torch ms: the fastest of its routes, which is its flash kernel, or m: its math path, f: flash "
    "with the mask as numbers. x: time of the other over ours, median of the repeats."
)
_PAGED = (
    "x paged: time of our call on the same keys in pages of 16 that lie in any order, over that of "
    "keys that lie together."
)
_CODES = (
    "x int8, x fp8: time of our call on the same keys as codes of 8 bits with a scale for each 64, "
    "over that of plain ones."
)
_PEAK = (
    "of peak: useful operations over the matrix peak of this run; decode: bytes of keys and values "
    "over the median of its read rates (what fits into the last cache may pass 100%)."
)


def print_record(record: Mapping[str, Any]) -> None:
    """Print the table of goals, the yardsticks, the memory, and what was missed."""
    table = Table(title=f"{record['backend']} and torch SDPA, {record['threads']} threads")
    for name in ("case", "ours ms", "torch ms", "x torch", "min..max", "goal", "met", "of peak"):
        table.add_column(name, justify="left" if name in ("case", "met") else "right")
    peers = sorted({name for row in record["rows"] for name in row["peers"]})
    for name in peers:
        table.add_column(f"x {name}", justify="right")
    for row in record["rows"]:
        ratio = row["ratio"]
        table.add_row(
            row["name"],
            _short(row["ours_ms"]["median"]),
            _short(row["torch_ms"]["median"]) + _mark(row["torch_route"]),
            _short(ratio["median"]),
            f"{_short(ratio['min'])}..{_short(ratio['max'])}",
            "" if row["goal"] is None else f"{row['goal']:g}",
            _met(row),
            _share(row),
            *(_peer(row["peers"].get(name)) for name in peers),
        )
    console(width=_WIDTH + _WIDTH_OF_PEER * len(peers) if peers else 0).print(table)
    for line in (*_yardsticks(record), *_memory(record), *_footer(record)):
        say(line)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _mark(route: str) -> str:
    return {"flash": "", "math": " m"}.get(route, " f")


def _met(row: Mapping[str, Any]) -> str:
    if row["wrong"]:
        return "WRONG"
    return "" if row.get("met") is None else "yes" if row["met"] else "no"


def _share(row: Mapping[str, Any]) -> str:
    rate = f"{row['ours_gbs']:.0f} GB/s " if "ours_gbs" in row else ""
    return f"{rate}{row['ours_share']:.0%}"


def _peer(peer: Mapping[str, Any] | None) -> str:
    if peer is None or "unable" in peer:
        return "" if peer is None else "-"
    return "wrong" if peer["wrong"] else _short(peer["ratio"]["median"])


def _yardsticks(record: Mapping[str, Any]) -> list[str]:
    lines = [_ROUTES, _PEAK]
    if any("paged" in row["peers"] for row in record["rows"]):
        lines[1:1] = [_PAGED, _CODES]
    for name, stick in record["yardsticks"].items():
        lines.append(
            f"{name}: {_short(stick['max'])} {stick['unit']} (median {_short(stick['median'])}, "
            f"{stick['source']})"
        )
    return lines


def _memory(record: Mapping[str, Any]) -> list[str]:
    def mib(value: float | None) -> str:
        return "not known here" if value is None else f"{value:.1f} MiB"

    return [
        f"{row['name']}: {mib(row['ours_mib'])} beside inputs and output, torch "
        f"{mib(row['torch_mib'])}, goal {row['goal_mib']:g} MiB"
        for row in record["memory"]
    ]


def _engines(record: Mapping[str, Any]) -> list[str]:
    found = record.get("engines", {})
    versions = [
        " ".join(f"{name} {version}" for name, version in about["versions"].items())
        for about in found.values()
        if "versions" in about
    ]
    return [f"engines: {', '.join(versions)}"] if versions else []


def _reasons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say once for each reason why an engine has no figure, with the cases."""
    why: dict[str, list[str]] = {}
    for row in rows:
        for name, peer in row["peers"].items():
            said = peer.get("unable") or (peer["wrong"] and f"wrong result: {peer['wrong']}")
            if said:
                why.setdefault(f"{name}: {said}", []).append(row["name"])
    return [
        f"{said} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})"
        for said, names in why.items()
    ]


def _footer(record: Mapping[str, Any]) -> list[str]:
    rows = record["rows"]
    dropped = sum(row["dropped"] for row in rows)
    worst = max(row["foreign"]["max"] for row in rows)
    repeats = (
        f"{record['repeats']} repeats of each case are kept, {dropped} of all were dropped because "
        f"others were busy; others took {worst:.0%} of the machine in the busiest that was kept."
    )
    lines = [repeats, conditions(record), *_engines(record)]
    lines += [f"{row['name']}: limited by {row['limit']}" for row in rows if row["limit"]]
    lines += [f"{row['name']}: wrong result: {row['wrong']}" for row in rows if row["wrong"]]
    lines += [f"{name}: not run, {why}" for name, why in record["left_out"].items()]
    lines += _reasons(rows)
    if record["quick"]:
        return [*lines, "quick run at an eighth of the lengths: the goals are for the whole ones"]
    return [*lines, *_verdict(record)]


def _verdict(record: Mapping[str, Any]) -> list[str]:
    lines = [f"goals over torch: those of {record['goals_of']}"]
    if record["goals_of"] == OTHERS.name:
        lines = [f"goals over torch: stated for {ZEN4.name} and {AMX.name}, not for this processor"]
    missed = [
        f"goal missed: {row['name']}: {said(one)}"
        for row in record["rows"]
        for one in row.get("goals", ())
        if not one["met"]
    ]
    missed += [
        f"goal missed: {row['name']}: {row['ours_mib']:.1f} MiB (goal: at most {row['goal_mib']:g})"
        for row in record["memory"]
        if row.get("met") is False
    ]
    return [*lines, *(missed or ["all goals met"])]
