"""What people see of a run of ``bench models``: the counts, then every model that is not equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from polyattn.bench.models.model_row import OUTCOMES, Row
from polyattn.bench.report import console, say

__all__ = ["print_record"]

_LISTED = ("different", "unsteady", "crashed", "cut short", "refused")
_GROUPED = ("not built", "not of the interface", "no attention")


def print_record(record: Mapping[str, Any], every: bool = False) -> None:
    """Print the counts, the models that are not equal with their reasons, and the verdict."""
    counts = record["counts"]
    rows = [asdict(Row.from_json(row)) for row in record["rows"]]
    table = Table(title=f"{len(rows)} configurations of {record['library']} {record['version']}")
    for name in ("models", "outcome", "which means"):
        table.add_column(name, justify="right" if name == "models" else "left", overflow="fold")
    for outcome, meaning in OUTCOMES.items():
        if outcome in counts:
            table.add_row(str(counts[outcome]), outcome, meaning)
    console().print(table)
    for row in rows:
        if row["outcome"] in _LISTED:
            say(f"{row['outcome']}: {row['name']} ({row['model']}): {row['reason']}")
    _say_groups(rows, every)
    cases = sum(len(row["cases"]) for row in rows if row["outcome"] == "equal")
    say(
        f"{record['calls']} attention calls ran on polyattn; {cases} runs of models were equal, on "
        f"{', '.join(_backends(rows)) or 'nothing'}; the masks were of {_kinds(rows)}."
    )
    say(f"{record['took_s']} s on {record['machine']['cpu']}: {record['command']}")


def _say_groups(rows: Sequence[Mapping[str, Any]], every: bool) -> None:
    if every:
        names = [f"{row['name']} ({row['calls']})" for row in rows if row["outcome"] == "equal"]
        say(f"equal, with their calls: {', '.join(names)}")
    for outcome in _GROUPED:
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if row["outcome"] == outcome:
                reasons.setdefault(row["reason"], []).append(row["name"])
        for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
            say(f"{outcome}: {', '.join(names)}{f': {reason}' if reason else ''}")


def _backends(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({name for row in rows for name in row["backends"]})


def _kinds(rows: Sequence[Mapping[str, Any]]) -> str:
    from polyattn.masks.structure import structure_of

    found = {
        leaf.kind for row in rows for mask in row["masks"] if "(" in mask
        for leaf in structure_of(mask).leaves()
    }  # fmt: skip
    return ", ".join(sorted(found)) or "no kind"
