"""Timing of forwards: each case between two untraced blocks, in rounds of changing order.

The ratio of a case is its block over the mean of the two beside it, so that a drift of the clock
cancels. Rounds are kept by how little other processes took meanwhile, never by the result.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyattn.bench.timing import QUIET, Watch
from polyattn.bench.trace.overhead_peers import Case

__all__ = ["Ratios", "Rounds", "interval", "summary", "time_cases"]


@dataclass(frozen=True)
class Block:
    """Seconds of a forward: by the clock, with what was to be written after it, of processors."""

    wall: float
    written: float
    processor: float


@dataclass
class Ratios:
    """What one case took in forwards without it, an entry for each round."""

    wall: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def add(self, case: Block, before: Block, after: Block) -> None:
        """Take the blocks of one round."""
        base = (before.wall + after.wall) / 2
        self.wall.append(case.wall / base)
        self.written.append(case.written / base)
        self.processor.append(case.processor * 2 / (before.processor + after.processor))


@dataclass(frozen=True)
class Rounds:
    """All that was measured: `base`, a forward's seconds; `foreign`, others' share of the cores."""

    ratios: Mapping[str, Ratios]
    base: float
    foreign: Sequence[float]
    dropped: int


def time_cases(
    model: nn.Module, inputs: Sequence[Mapping[str, Any]], cases: Sequence[Case], folder: Path,
    *, rounds: int, block_s: float,
) -> Rounds:  # fmt: skip
    """Time forwards of the model in each case; at most twice as many rounds as are kept."""
    feed = itertools.cycle(inputs)
    forwards = _forwards_in(model, feed, block_s)

    def untraced() -> Block:
        return _block(model, feed, forwards, lambda: None)

    done: list[tuple[float, dict[str, tuple[Block, Block, Block]]]] = []
    while len(done) < 2 * rounds and sum(load <= QUIET for load, _ in done) < rounds:
        watch, found = Watch(), {}
        turn = len(done) % len(cases)
        before = untraced()
        for case in (*cases[turn:], *cases[:turn]):
            with case.around(model, folder) as wait:
                during = _block(model, feed, forwards, wait)
            after = untraced()
            found[case.name] = during, before, after
            before = after
        done.append((watch.foreign(), found))
    kept = sorted(done, key=lambda entry: entry[0])[:rounds]
    ratios = {case.name: Ratios() for case in cases}
    for name, one in ((name, one) for _, found in kept for name, one in found.items()):
        ratios[name].add(*one)
    bases = [one.wall for _, found in kept for blocks in found.values() for one in blocks[1:]]
    loads = [load for load, _ in kept]
    return Rounds(ratios, statistics.median(bases), loads, len(done) - len(kept))


def _forwards_in(model: nn.Module, feed: Iterator[Mapping[str, Any]], block_s: float) -> int:
    """How many forwards fill a block; warms the model up."""
    for forwards in (2, 3):
        took = _block(model, feed, forwards, lambda: None).wall
    return max(2, min(1000, round(block_s / took)))


def _block(
    model: nn.Module, feed: Iterator[Mapping[str, Any]], forwards: int, wait: Callable[[], None]
) -> Block:
    """Time forwards one after another, none the same as the one before; the first is not timed."""
    with torch.no_grad():
        model(**next(feed))
        wait()
        processor, start = time.process_time(), time.perf_counter()
        for _ in range(forwards):
            model(**next(feed))
        end = time.perf_counter()
        wait()
        written = time.perf_counter()
    took = time.process_time() - processor
    return Block((end - start) / forwards, (written - start) / forwards, took / forwards)


def summary(ratios: Sequence[float]) -> dict[str, float]:
    """Return the median, its interval of 95 % confidence, and the quartiles.

    >>> summary([1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06])["median"]
    1.03
    """
    low, high = interval(ratios)
    q1, _, q3 = statistics.quantiles(ratios, n=4, method="inclusive")
    found = {
        "median": statistics.median(ratios), "low": low, "high": high, "q1": q1, "q3": q3,
    }  # fmt: skip
    return {name: round(value, 4) for name, value in found.items()}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return between which two of the values their median lies, with 95 % confidence or more.

    It assumes nothing of how they are distributed. Fewer than six values give all there is.

    >>> interval(list(range(1, 11)))
    (2, 9)
    """
    ordered, n = sorted(values), len(values)
    below, k = 0.0, 0
    while k < n // 2 and below + math.comb(n, k) / 2**n <= 0.025:
        below += math.comb(n, k) / 2**n
        k += 1
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]
