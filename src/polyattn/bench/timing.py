"""Timing of short calls on a machine that others use too: paired, interleaved, in one process.

A *pair* times a statement and what it is compared with in four blocks, A B B A, so that a drift of
the clock cancels. Blocks are a few milliseconds, hundreds of calls: long against the clock, short
against the time slices of other processes, so that the median drops what those disturb. A
*round* times every row in turn, several pairs of each. Rounds during which other processes were
busy are measured again, and the quietest are kept: chosen by the others' load, never by the
result. The garbage collector is off within a block.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from timeit import Timer
from typing import Any

__all__ = ["QUIET", "Pair", "Rounds", "Timed", "Watch", "calibrate", "time_pairs"]

QUIET = 0.06
"""The share of all cores that other processes may take in a round that counts as quiet."""
PAIRS = 5
"""Pairs of each row in a round."""

Scope = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Pair:
    """Two statements whose difference is wanted; `scope` surrounds the blocks of the first."""

    statement: str
    over: str
    scope: Scope = nullcontext


@dataclass
class Timed:
    """What was measured of one row, in seconds per call, one entry per pair."""

    calls: int
    extras: list[float] = field(default_factory=list)
    bases: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return median, min, max and quartiles of the extra time, in microseconds.

        >>> Timed(10, [1e-6, 2e-6, 3e-6], [5e-6] * 3).summary()["extra_us"]["median"]
        2.0
        """
        low, _, high = statistics.quantiles(self.extras, n=4, method="inclusive")
        extra = {
            "median": statistics.median(self.extras), "min": min(self.extras),
            "max": max(self.extras), "q1": low, "q3": high,
        }  # fmt: skip
        return {
            "extra_us": {name: round(seconds * 1e6, 3) for name, seconds in extra.items()},
            "over_us": round(statistics.median(self.bases) * 1e6, 3),
            "calls_per_block": self.calls,
        }


@dataclass
class Rounds:
    """How quiet the machine was: the share of all cores that others took, per kept round."""

    foreign: list[float] = field(default_factory=list)
    dropped: int = 0


def calibrate(pair: Pair, namespace: Mapping[str, Any], block_s: float) -> int:
    """Return how many calls of the statement fill a block; warms both statements up."""
    names = dict(namespace)
    Timer(pair.over, globals=names).timeit(50)
    with pair.scope():
        timer = Timer(pair.statement, globals=names)
        timer.timeit(50)
        per_call = max(min(timer.timeit(20) for _ in range(5)) / 20, 1e-9)
    return max(1, round(block_s / per_call))


def time_pairs(
    pairs: Sequence[Pair], namespace: Mapping[str, Any], *, rounds: int, block_s: float
) -> tuple[list[Timed], Rounds]:
    """Time all pairs in interleaved rounds; at most twice as many as are kept."""
    names = dict(namespace)
    timed = [Timed(calibrate(pair, names, block_s)) for pair in pairs]
    timers = [(Timer(p.statement, globals=names), Timer(p.over, globals=names)) for p in pairs]
    done: list[tuple[float, list[list[tuple[float, float]]]]] = []
    while len(done) < 2 * rounds and sum(load <= QUIET for load, _ in done) < rounds:
        watch = Watch()
        found = [
            [_abba(*both, pair.scope, one.calls) for _ in range(PAIRS)]
            for both, pair, one in zip(timers, pairs, timed, strict=True)
        ]
        done.append((watch.foreign(), found))
    kept = sorted(done, key=lambda entry: entry[0])[:rounds]
    for _, found in kept:
        for one, of_row in zip(timed, found, strict=True):
            one.extras += [extra for extra, _ in of_row]
            one.bases += [base for _, base in of_row]
    return timed, Rounds([load for load, _ in kept], len(done) - len(kept))


def _abba(statement: Timer, over: Timer, scope: Scope, calls: int) -> tuple[float, float]:
    """Return the extra and the base seconds per call of one pair."""

    def block() -> float:
        with scope():
            return statement.timeit(calls)

    first, base, base_again, last = block(), over.timeit(calls), over.timeit(calls), block()
    mean_base = (base + base_again) / 2 / calls
    return (first + last) / 2 / calls - mean_base, mean_base


class Watch:
    """The processor time that other processes take, from now on; 0 where the system won't say.

    `processes`: ids of those that work for this one, and are no others.
    """

    def __init__(self, processes: Sequence[int] = ()) -> None:
        self._processes = tuple(processes)
        self._before = self._now()

    def foreign(self) -> float:
        """Return the share of all cores that others took since the watch was started."""
        wall, busy, own = (
            now - before for now, before in zip(self._now(), self._before, strict=True)
        )
        cores = os.cpu_count() or 1
        return min(1.0, max(0.0, busy - own) / (cores * wall)) if wall > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        times = os.times()
        own = times.user + times.system + sum(map(_processor_time, self._processes))
        try:
            with open("/proc/stat", encoding="ascii") as lines:
                ticks = [int(tick) for tick in lines.readline().split()[1:9]]
        except (OSError, ValueError):
            return time.perf_counter(), own, own
        user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, own


def _processor_time(process: int) -> float:
    """Return the processor time of another process so far, 0 where it cannot be known."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as lines:
            user, system = lines.read().rpartition(")")[2].split()[11:13]
    except (OSError, ValueError):
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
