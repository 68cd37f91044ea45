"""Timing of forwards: each case between two untraced blocks, in rounds of changing order.

The ratio of a case is its block over the mean of the two beside it, so that a drift of the clock
cancels. A block has as many forwards as fill it by the case's own time. Rounds are kept by how
little other processes took meanwhile, never by the result.
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
from polyattn.bench.trace.allocator import page_faults
from polyattn.bench.trace.overhead_peers import Case

__all__ = ["Ratios", "Rounds", "interval", "summary", "time_cases"]


_MOST = 1000


@dataclass(frozen=True)
class Block:
    """Seconds of a forward: by the clock, with what was to be written after it, of processors.

    `faults`: how many pages a forward was given by the system.
    """

    wall: float
    written: float
    processor: float
    faults: float


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
    """All that was measured: `base`, a forward's seconds; `foreign`, others' share of the cores.

    `faults`: pages given to an untraced forward, in each block. `forwards`: of each case's block.
    """

    ratios: Mapping[str, Ratios]
    base: float
    foreign: Sequence[float]
    dropped: int
    faults: Sequence[float]
    forwards: Mapping[str, int]


def time_cases(
    model: nn.Module,
    inputs: Sequence[Mapping[str, Any]],
    cases: Sequence[Case],
    folder: Path,
    *,
    rounds: int,
    block_s: float,
) -> Rounds:
    """Time forwards of the model in each case; at most twice as many rounds as are kept."""
    feed = itertools.cycle(inputs)
    base = _fill_of(model, feed, block_s, lambda: None)
    fill = {case.name: _of_case(case, model, feed, block_s, folder) for case in cases}

    def untraced() -> Block:
        return _block(model, feed, base, lambda: None)

    done: list[tuple[float, dict[str, tuple[Block, Block, Block]]]] = []
    while len(done) < 2 * rounds and sum(load <= QUIET for load, _ in done) < rounds:
        watch, found = Watch(), {}
        turn = len(done) % len(cases)
        before = untraced()
        for case in (*cases[turn:], *cases[:turn]):
            with case.around(model, folder) as wait:
                during = _block(model, feed, fill[case.name], wait)
            after = untraced()
            found[case.name] = during, before, after
            before = after
        done.append((watch.foreign(), found))
    kept = sorted(done, key=lambda entry: entry[0])[:rounds]
    ratios = {case.name: Ratios() for case in cases}
    for name, one in ((name, one) for _, found in kept for name, one in found.items()):
        ratios[name].add(*one)
    bases = [one for _, found in kept for blocks in found.values() for one in blocks[1:]]
    return Rounds(
        ratios,
        statistics.median(one.wall for one in bases),
        [load for load, _ in kept],
        len(done) - len(kept),
        [one.faults for one in bases],
        {name: one.forwards for name, one in fill.items()},
    )


@dataclass(frozen=True)
class Fill:
    """How many forwards are timed in a block, and how many run before them."""

    forwards: int
    before: int = 1


def _of_case(
    case: Case, model: nn.Module, feed: Iterator[Mapping[str, Any]], block_s: float, folder: Path
) -> Fill:
    with case.around(model, folder) as wait:
        return _fill_of(model, feed, block_s, wait)


def _fill_of(
    model: nn.Module, feed: Iterator[Mapping[str, Any]], block_s: float, wait: Callable[[], None]
) -> Fill:
    """Return what fills a block, at least 2 forwards; warms the model up.

    What takes long is tried with a single forward, and what is short with more of them. A forward
    that is longer than a block needs none before it: what the last case left in caches is little.
    """
    tried = 1
    while True:
        took = _block(model, feed, Fill(tried), wait).wall
        fill = max(2, min(_MOST, round(block_s / took)))
        if fill <= 8 * tried:
            return Fill(fill, int(took < block_s))
        tried = max(fill // 4, 2 * tried)


def _block(
    model: nn.Module, feed: Iterator[Mapping[str, Any]], fill: Fill, wait: Callable[[], None]
) -> Block:
    """Time forwards one after another, none the same as the one before; `fill.before` are not."""
    forwards = fill.forwards
    with torch.no_grad():
        for _ in range(fill.before):
            model(**next(feed))
        wait()
        faults, processor, start = page_faults(), time.process_time(), time.perf_counter()
        for _ in range(forwards):
            model(**next(feed))
        end = time.perf_counter()
        wait()
        written = time.perf_counter()
    took, faults = time.process_time() - processor, page_faults() - faults
    return Block(
        (end - start) / forwards, (written - start) / forwards, took / forwards, faults / forwards
    )


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
