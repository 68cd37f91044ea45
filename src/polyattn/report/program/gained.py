"""What a program's attention took, and would have taken with torch's own function, in all."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from polyattn.integrations.program.asked import Gain, Record
from polyattn.report.program.summary import classes

__all__ = ["Gained", "Range", "gained", "times_of"]


@dataclass(frozen=True)
class Range:
    """A measured value: its median, and the smallest and the largest of the rounds."""

    low: float
    about: float
    high: float


@dataclass(frozen=True)
class Gained:
    """All measured calls together. `times`: stock's time over ours; None if nothing was measured.

    `measured` of `calls` calls are in it; the rest have no times. `wrong`: kinds of problems whose
    result was. `foreign`: the largest share of the cores that others took meanwhile.
    """

    calls: int
    measured: int
    wrong: int
    seconds: Range | None
    stock_seconds: Range | None
    times: Range | None
    foreign: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        plain = dict(vars(self))
        return {k: vars(v) if isinstance(v, Range) else v for k, v in plain.items()}


def times_of(gain: Gain) -> Range | None:
    """Return how many times longer stock took, round by round; None without times."""
    if not gain.seconds:
        return None
    return _range(b / a for a, b in zip(gain.seconds, gain.stock_seconds, strict=True))


def gained(record: Record) -> Gained:
    """Return the gains of all kinds of problems together, each with all the calls of its kind.

    >>> gained(Record([], [])).times is None
    True
    """
    known = [
        (one.calls, one.gain)
        for one in classes(record)
        if one.gain is not None and one.gain.seconds
    ]
    rounds = min((len(gain.seconds) for _, gain in known), default=0)
    ours = [sum(calls * gain.seconds[at] for calls, gain in known) for at in range(rounds)]
    stock = [sum(calls * gain.stock_seconds[at] for calls, gain in known) for at in range(rounds)]
    some = rounds > 0
    return Gained(
        sum(case.calls for case in record.cases),
        sum(calls for calls, _ in known),
        sum(gain.note.startswith("WRONG") for gain in record.gains),
        _summed((calls, gain.seconds) for calls, gain in known) if some else None,
        _summed((calls, gain.stock_seconds) for calls, gain in known) if some else None,
        _range(b / a for a, b in zip(ours, stock, strict=True)) if some else None,
        max((gain.foreign for _, gain in known), default=0.0),
    )


def _summed(measured: Iterable[tuple[int, tuple[float, ...]]]) -> Range:
    found = list(measured)
    low, about, high = (
        sum(calls * of(seconds) for calls, seconds in found) for of in (min, statistics.median, max)
    )
    return Range(low, about, high)


def _range(values: Iterable[float]) -> Range:
    found = list(values)
    return Range(min(found), statistics.median(found), max(found))
