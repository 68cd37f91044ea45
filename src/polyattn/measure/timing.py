"""Honest times of several ways to do the same: interleaved, in one process, with a watch on others.

A *block* is a few milliseconds of calls: short against the time slices of other processes, so
that a median drops what those disturb. A *round* goes over all candidates several times, in an
order that turns, and gives each the median of its blocks. Rounds during which other processes
took more than :data:`QUIET` of the cores are measured again (at most half as many as there are
rounds), and the quietest are kept: chosen by the others' load, never by the result. Warm-up is
apart; the cost of the loop is subtracted. Candidates that are far behind run once a round.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import repeat

__all__ = ["QUIET", "Times", "once", "time_interleaved"]

QUIET = 0.06
_ROUND_S = 0.15  # the system counts processor time in steps of 10 ms
_MOST_BLOCKS = 12
_FAR = 6.0
_LATE = 4.0
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
    steps: Mapping[str, Step], synchronise: Step, *, rounds: int, block_s: float = 0.005
) -> dict[str, Times]:
    """Time all steps, which must be warm, in at least `rounds` rounds."""
    single = {name: min(once(step, synchronise) for _ in range(3)) for name, step in steps.items()}
    near = [name for name in steps if single[name] <= _FAR * min(single.values())]
    loops = {name: max(1, min(20_000, round(block_s / single[name]))) for name in steps}
    turns = max(1, min(_MOST_BLOCKS, round(_ROUND_S / sum(max(block_s, single[n]) for n in near))))
    kept: list[tuple[float, dict[str, float]]] = []
    for attempt in range(rounds + rounds // 2):
        names = near if attempt >= rounds else list(steps)
        watch = _Watch()
        blocks: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(turns):
            first = (attempt + turn) % len(names)
            for name in (*names[first:], *names[:first]):
                if turn == 0 or name in near:
                    blocks[name].append(_sample(steps[name], loops[name], synchronise, block_s))
        found = {name: statistics.median(seconds) for name, seconds in blocks.items()}
        kept.append((watch.foreign(), found))
        if attempt + 1 >= rounds and sum(f <= QUIET for f, _ in kept) >= rounds:
            break
    quiet = sorted(kept, key=lambda entry: entry[0])[:rounds]
    times = {}
    for name in steps:
        chosen = quiet if name in near else kept[:rounds]
        worst = max(foreign for foreign, _ in chosen)
        times[name] = Times(tuple(found[name] for _, found in chosen), worst)
    return times


def _sample(step: Step, loops: int, synchronise: Step, block_s: float) -> float:
    collected = gc.isenabled()
    gc.disable()
    try:
        empty = _block(_nothing, loops, _nothing, math.inf) if loops > 1 else 0.0
        full = _block(step, loops, synchronise, _LATE * block_s)
    finally:
        if collected:
            gc.enable()
    return max(full - empty, 1e-9)


def _block(step: Step, loops: int, synchronise: Step, limit_s: float) -> float:
    """Return seconds per call; a block that others slow down many times over is cut short."""
    part, calls = -(-loops // 5), 0
    synchronise()
    begin = time.perf_counter()
    while calls < loops:
        for _ in repeat(None, part):
            step()
        calls += part
        if time.perf_counter() - begin > limit_s:
            break
    synchronise()
    return (time.perf_counter() - begin) / calls


def _nothing() -> None:
    return None


class _Watch:
    """The processor time that other processes take, from now on; 0 where the system won't say."""

    def __init__(self) -> None:
        self._before = self._now()

    def foreign(self) -> float:
        wall, busy, own = (a - b for a, b in zip(self._now(), self._before, strict=True))
        if wall <= 0:
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
