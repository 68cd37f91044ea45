"""Two kernels timed by turns, in milliseconds, with an eye on who else uses the processors.

What others do makes a call longer, never shorter, so the fastest call of each kernel counts. The
pairs are split in two halves, which have to agree; and rounds in which the threads of this process
had to wait for a processor count for nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from polyattn.selection.evidence.calibrated_rows import SOURCE
from polyattn.selection.evidence.figures import Figure

__all__ = ["BUSY", "SCATTERED", "Compared", "compare", "waited_s"]

_PAIRS, _ROUNDS = 6, 3
_ROUND_S = 0.004  # a round ends then, unless it has too few pairs
_FEWEST = 3
_WAITED = 0.1
_AGREE, _CLEAR = 1.1, 1.25

BUSY = "not calibrated yet: the machine was too busy"
SCATTERED = "not calibrated: the times scattered too much"

Step = Callable[[], object]


@dataclass(frozen=True)
class Compared:
    """A ratio, the seconds of the first kernel's fastest call, and how many pairs there were."""

    figure: Figure
    native_s: float
    pairs: int


def compare(
    native: Step,
    theirs: Step,
    threads: int,
    clock: Callable[[], float] = time.perf_counter,
    waited: Callable[[], float | None] | None = None,
    patience: int = 2,
) -> Compared | str:
    """Time two kernels by turns; or say why that gave no result.

    `patience`: in how many rounds others may disturb before it is given up.
    """
    waited = waited_s if waited is None else waited
    pairs: list[tuple[float, float]] = []
    busy = 0
    for _ in range(_ROUNDS):
        before, begin = waited(), clock()
        found = _round(native, theirs, clock)
        after, end = waited(), clock()
        if before is not None and after is not None:
            share = (after - before) / max(end - begin, 1e-9) / max(1, threads)
            if share > _WAITED:
                busy += 1
                if busy >= patience:  # it will not be quiet a millisecond later
                    return BUSY
                continue
        pairs += found
        figure = _ratio(pairs)
        if _is_clear(figure):
            return Compared(figure, min(mine for mine, _ in pairs), len(pairs))
    return SCATTERED


def _round(native: Step, theirs: Step, clock: Callable[[], float]) -> list[tuple[float, float]]:
    pairs: list[tuple[float, float]] = []
    begin = clock()
    while len(pairs) < _PAIRS:
        start = clock()
        native()
        middle = clock()
        theirs()
        end = clock()
        pairs.append((max(middle - start, 1e-9), max(end - middle, 1e-9)))
        if len(pairs) >= _FEWEST and end - begin > _ROUND_S:
            break
    return pairs


def _ratio(pairs: list[tuple[float, float]]) -> Figure:
    """Return the ratio of the fastest calls, its low and high that of the worse and better half."""
    every = [_of_fastest(pairs), _of_fastest(pairs[::2]), _of_fastest(pairs[1::2])]
    return Figure(min(every), every[0], max(every), SOURCE)


def _of_fastest(pairs: list[tuple[float, float]]) -> float:
    return min(theirs for _, theirs in pairs) / min(mine for mine, _ in pairs)


def _is_clear(figure: Figure) -> bool:
    """Say whether both halves agree, or at least on which of the two is faster by far."""
    same = figure.high <= _AGREE * figure.low
    return same or figure.low >= _CLEAR or figure.high <= 1 / _CLEAR


def waited_s() -> float | None:
    """Return how long this process's threads had to wait for a processor; None: it is not told.

    >>> (waited_s() or 0.0) >= 0
    True
    """
    total, told = 0, False
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return None
    for thread in threads:
        try:
            with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as lines:
                total += int(lines.read().split()[1])
            told = True
        except (OSError, ValueError, IndexError):  # it has ended, or the kernel does not count
            continue
    return total / 1e9 if told else None
