"""Times of several ways to do the same, interleaved in one process, with a watch on others.

A *block* is some calls of one way, tens of milliseconds together. A *repeat* times a block of
every way, in an order that turns, and more than one where they are short: the system counts
processor time in steps of 10 ms, so the watch needs a while to say anything. Repeats in which
other processes were busy are made again, at most as many as are wanted, and the quietest are kept:
chosen by the others' load, never by the result. Before a block the process idles for a few
milliseconds, so that the threads of another library that still spin go to sleep.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from polyattn.bench.timing import QUIET, Rounds, Watch

__all__ = ["Series", "Step", "load", "once", "over", "spread", "time_steps"]

IDLE_S = 0.004
_REPEAT_S = 0.15
_MOST_TURNS = 6


@dataclass(frozen=True)
class Step:
    """What is timed; `scope` surrounds its blocks, outside the timer.

    `timed`: runs so many calls in another process; returns their seconds and processor time.
    `warm`: a call that is not timed comes before each block.
    """

    run: Callable[[], object]
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    timed: Callable[[int], tuple[float, float]] | None = None
    warm: bool = False


@dataclass
class Series:
    """Seconds per call, one entry for each kept repeat, in the same order for all ways.

    `processor`: the processor time of all threads, those that spin while they wait included.
    """

    seconds: list[float] = field(default_factory=list)
    calls: int = 1
    processor: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the repeats."""
        return statistics.median(self.seconds)

    def ms(self) -> dict[str, float]:
        """Return the spread of the repeats, in milliseconds."""
        return spread([seconds * 1e3 for seconds in self.seconds])


def over(a: Series, b: Series) -> dict[str, float]:
    """Return the spread of a / b, repeat by repeat."""
    return spread([x / y for x, y in zip(a.seconds, b.seconds, strict=True)])


def load(quiet: Rounds) -> dict[str, Any]:
    """Return what a row says of how busy others were."""
    return {
        "repeats": len(quiet.foreign),
        "dropped": quiet.dropped,
        "foreign": {
            "median": round(statistics.median(quiet.foreign), 4),
            "max": round(max(quiet.foreign), 4),
        },
    }


def once(step: Step) -> float:
    """Time a single call."""
    if step.timed is not None:
        time.sleep(IDLE_S)
        return max(step.timed(1)[0], 1e-9)
    with step.scope():
        time.sleep(IDLE_S)
        begin = time.perf_counter()
        step.run()
        return max(time.perf_counter() - begin, 1e-9)


def time_steps(
    steps: Mapping[str, Step], *, repeats: int, block_s: float, processes: Sequence[int] = ()
) -> tuple[dict[str, Series], Rounds]:
    """Time all steps, which must be warm, in `repeats` repeats that are kept.

    `processes`: ids of those that run steps, whose processor time is not that of others.
    """
    single = {name: min(once(step) for _ in range(2)) for name, step in steps.items()}
    loops = {name: max(1, math.ceil(block_s / seconds)) for name, seconds in single.items()}
    repeat_s = sum((loops[n] + step.warm) * single[n] + IDLE_S for n, step in steps.items())
    turns = max(1, min(_MOST_TURNS, math.ceil(_REPEAT_S / repeat_s)))
    done: list[tuple[float, dict[str, tuple[float, float]]]] = []
    while len(done) < 2 * repeats and sum(load <= QUIET for load, _ in done) < repeats:
        watch = Watch(processes)
        blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for turn in range(turns):
            for name in _turned(list(steps), len(done) + turn):
                blocks[name].append(_block(steps[name], loops[name]))
        found = {name: _medians(timed) for name, timed in blocks.items()}
        done.append((watch.foreign(), found))
    kept = sorted(done, key=lambda entry: entry[0])[:repeats]
    series = {name: Series([], loops[name]) for name in steps}
    for (_, found), (name, one) in itertools.product(kept, series.items()):
        one.seconds.append(found[name][0])
        one.processor.append(found[name][1])
    return series, Rounds([load for load, _ in kept], len(done) - len(kept))


def _medians(timed: Sequence[tuple[float, float]]) -> tuple[float, float]:
    wall, processor = (statistics.median(seconds) for seconds in zip(*timed, strict=True))
    return wall, processor


def _turned(names: Sequence[str], by: int) -> list[str]:
    first = by % len(names)
    return [*names[first:], *names[:first]]


def _block(step: Step, calls: int) -> tuple[float, float]:
    """Return the seconds of a call and the processor time of all threads, means of a block."""
    if step.timed is not None:
        if step.warm:
            step.timed(1)
        time.sleep(IDLE_S)
        seconds, busy = step.timed(calls)
        return max(seconds, 1e-9) / calls, busy / calls
    run, collected = step.run, gc.isenabled()
    gc.disable()
    try:
        with step.scope():
            if step.warm:
                run()
            time.sleep(IDLE_S)
            busy, begin = time.process_time(), time.perf_counter()
            for _ in range(calls):
                run()
            seconds = max(time.perf_counter() - begin, 1e-9)
            return seconds / calls, (time.process_time() - busy) / calls
    finally:
        if collected:
            gc.enable()


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Return median, min, max and quartiles.

    >>> spread([1.0, 2.0, 4.0])
    {'median': 2.0, 'min': 1.0, 'max': 4.0, 'q1': 1.5, 'q3': 3.0}
    """
    low = high = values[0]
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    found = {
        "median": statistics.median(values), "min": min(values), "max": max(values),
        "q1": low, "q3": high,
    }  # fmt: skip
    return {name: _rounded(value, digits) for name, value in found.items()}


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
