"""The rows of a verdict as the columns that the page's script reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from polyattn.report.kit.escaping import cut, json_text, visible
from polyattn.report.verdict.window import Window, window

if TYPE_CHECKING:
    from polyattn.trace.compare.verdict import Culprit, Row, Verdict

__all__ = ["columns"]

_NAME = 240
_BYTES = 12_000_000
_FEWEST = 500


def columns(verdict: Verdict, rows: int) -> tuple[str, Window]:
    """Return the JSON of at most `rows` rows, and which those are.

    Names have at most some 240 characters, and of what is larger than 12 MB, as names made up to
    be, fewer rows are kept.
    """
    while True:
        kept = window(verdict.rows, rows)
        text = json_text(_data(verdict, kept))
        if len(text) <= _BYTES or rows <= _FEWEST:
            return text, kept
        rows = max(_FEWEST, min(rows, len(verdict.rows)) // 2)


class _Names:
    """Numbers for texts: as shown, short, and different for different texts."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self._known: dict[str, int] = {}
        self._taken: set[str] = set()

    def at(self, text: str | None) -> int:
        if text is None:
            return -1
        number = self._known.get(text)
        if number is None:
            number = self._known[text] = len(self.shown)
            self.shown.append(self._unlike(_short(text)))
        return number

    def _unlike(self, shown: str) -> str:
        found, count = shown, 1
        while found in self._taken:
            count += 1
            found = f"{shown} #{count}"
        self._taken.add(found)
        return found


def _short(text: str) -> str:
    """At most some 280 characters: escapes are longer than what they stand for."""
    shown = visible(cut(text, _NAME))
    return shown if len(shown) <= _NAME + 30 else f"{shown[:180]}...{shown[-80:]}"


def _data(verdict: Verdict, kept: Window) -> dict[str, Any]:
    rows = verdict.rows[kept.first : kept.stop]
    names, words = _Names(), _Names()
    steps: dict[int | None, int] = {None: -1}

    def step(row: Row) -> int:
        return steps.setdefault(row.step, len(steps) - 1)

    columns: dict[str, Callable[[Row], Any]] = {
        "module": lambda row: names.at(row.module),
        "reference": lambda row: names.at(row.reference_module),
        "cls": lambda row: words.at(row.cls),
        "backward": lambda row: int(row.phase == "backward"),
        "step": step,
        "call": lambda row: row.call,
        "depth": lambda row: row.depth,
        "in": lambda row: _number(row.error_in),
        "out": lambda row: _number(row.error_out),
        "inherited": lambda row: _number(row.inherited),
        "added": lambda row: _number(row.contributed),
        "threshold": lambda row: _number(row.threshold),
        "verdict": lambda row: words.at(row.verdict),
        "how": lambda row: words.at(row.how),
        "note": lambda row: words.at(row.note),
    }
    found = {name: [column(row) for row in rows] for name, column in columns.items()}
    return {
        "rows": found,
        "first": kept.first,
        "total": len(verdict.rows),
        "culprit": _culprit(verdict.culprit, rows),
        "names": names.shown,
        "words": words.shown,
        "steps": [str(one) for one in steps if one is not None],
    }


def _culprit(culprit: Culprit | None, rows: Sequence[Row]) -> dict[str, Any] | None:
    """The culprit's first row, and the row and side where it shows."""
    row = next((at for at, one in enumerate(rows) if one.verdict == "culprit"), None)
    if culprit is None or row is None:
        return None
    shows = row
    if culprit.kind == "input":
        later = range(row, len(rows))
        shows = next((at for at in later if rows[at].module == culprit.at), row)
    return {"row": row, "shows": shows, "side": "in" if culprit.kind == "input" else "out"}


def _number(value: float | None) -> float | str | None:
    """Four digits; what JSON has no number for as text."""
    if value is None:
        return None
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf"
    return float(f"{value:.4g}") if value else 0
