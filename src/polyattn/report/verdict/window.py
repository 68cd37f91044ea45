"""Window: the rows that a page holds when a comparison has more than fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyattn.trace.compare.verdict import Row

__all__ = ["Window", "ratio", "window"]

_DIFFERS = ("culprit", "differs", "cannot say", "inherited", "extra", "missing")


@dataclass(frozen=True)
class Window:
    """The rows from `first` up to `stop` of all rows; `said`: what was left out, or ""."""

    first: int
    stop: int
    said: str = ""


def ratio(row: Row) -> float | None:
    """Return a row's larger error in units of its threshold; None where nothing was compared."""
    errors = [one for one in (row.error_in, row.error_out) if one is not None]
    if not errors or row.threshold is None:
        return None
    if any(map(math.isnan, errors)):
        return math.inf
    worst = max(errors)
    if row.threshold > 0:
        return 0.0 if math.isinf(row.threshold) else worst / row.threshold
    return math.inf if worst > 0 else 0.0


def window(rows: Sequence[Row], size: int) -> Window:
    """Return the `size` rows around the culprit, or around the first row that is not the same.

    A quarter of them are before it: what comes after the first difference is what spreads.
    """
    total = len(rows)
    if total <= size:
        return Window(0, total)
    centre = next((at for at, row in enumerate(rows) if row.verdict == "culprit"), None)
    around = "the culprit"
    if centre is None:
        centre = next((at for at, row in enumerate(rows) if row.verdict in _DIFFERS), None)
        around = "the first that is not the same"
    if centre is None:
        centre, around = 0, "the first"
    first = min(max(0, centre - size // 4), total - size)
    left = Counter(row.verdict for row in (*rows[:first], *rows[first + size :]))
    kinds = ", ".join(f"{count} {verdict}" for verdict, count in left.most_common(8))
    said = (
        f"rows {first + 1} to {first + size} of {total} are here, those around {around}; "
        f"left out: {kinds}"
    )
    return Window(first, first + size, said)
