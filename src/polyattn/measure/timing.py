"""Honest times of several ways to do the same: interleaved, in one process, with a watch on others.

In each round every candidate runs once for about the same time, in an order that turns from round
to round; a round during which other processes took more than :data:`QUIET` of the cores is
measured again (at most as often as there are rounds). Warm-up is apart; the cost of the loop is
subtracted.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import repeat

__all__ = ["QUIET", "Times", "once", "time_interleaved"]

QUIET = 0.06
Step = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Seconds per call, one entry for each round; `foreign`: the largest share others took."""

    seconds: tuple[float, ...]
    foreign: float = 0.0

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.seconds)

    @property
    def low(self) -> float:
        """The fastest round."""
        return min(self.seconds)

    @property
    def high(self) -> float:
        """The slowest round."""
        return max(self.seconds)


def once(step: Step, synchronise: Step) -> float:
    """Time a single call."""
    synchronise()
    begin = time.perf_counter()
    step()
    synchronise()
    return max(time.perf_counter() - begin, 1e-9)


def time_interleaved(
    steps: Mapping[str, Step], synchronise: Step, *, rounds: int, sample_s: float
) -> dict[str, Times]:
    """Time all steps, which must be warm; each sample takes about `sample_s`."""
    loops = {name: _loops(step, synchronise, sample_s) for name, step in steps.items()}
    kept: list[tuple[float, dict[str, float]]] = []
    for attempt in range(2 * rounds):
        names = list(steps)
        turn = attempt % max(1, len(names))
        watch = _Watch()
        found = {
            name: _sample(steps[name], loops[name], synchronise)
            for name in (*names[turn:], *names[:turn])
        }
        kept.append((watch.foreign(), found))
        if sum(foreign <= QUIET for foreign, _ in kept) >= rounds:
            break
    kept = sorted(kept, key=lambda entry: entry[0])[:rounds]  # chosen by others' load, not by result
    worst = max(foreign for foreign, _ in kept)
    return {name: Times(tuple(found[name] for _, found in kept), worst) for name in steps}


def _loops(step: Step, synchronise: Step, sample_s: float) -> int:
    fastest = min(once(step, synchronise) for _ in range(2))
    return max(1, min(20_000, round(sample_s / fastest)))


def _sample(step: Step, loops: int, synchronise: Step) -> float:
    collected = gc.isenabled()
    gc.disable()
    try:
        empty = _elapsed(_nothing, loops, _nothing) if loops > 1 else 0.0
        full = _elapsed(step, loops, synchronise)
    finally:
        if collected:
            gc.enable()
    return max(full - empty, 1e-9) / loops


def _elapsed(step: Step, loops: int, synchronise: Step) -> float:
    synchronise()
    begin = time.perf_counter()
    for _ in repeat(None, loops):
        step()
    synchronise()
    return time.perf_counter() - begin


def _nothing() -> None:
    return None


class _Watch:
    """The processor time that other processes take, from now on; 0 where the system won't say."""

    def __init__(self) -> None:
        self._before = self._now()

    def foreign(self) -> float:
        wall, busy, own = (a - b for a, b in zip(self._now(), self._before, strict=True))
        if wall < 0.1:  # the system counts in steps of 10 ms
            return 0.0
        return min(1.0, max(0.0, busy - own) / ((os.cpu_count() or 1) * wall))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = os.times()
        own = times.user + times.system
        try:
            with open("/proc/stat", encoding="ascii") as lines:
                ticks = [int(tick) for tick in lines.readline().split()[1:9]]
        except (OSError, ValueError):
            return time.perf_counter(), own, own
        idle = ticks[3] + ticks[4]
        return time.perf_counter(), (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK"), own
