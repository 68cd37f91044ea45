"""One row of ``bench programs``: all sides of a program, in turns, compared and timed."""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyattn.bench.programs.language_programs import LANGUAGE
from polyattn.bench.programs.program_rows import OURS, ProgramRow
from polyattn.bench.programs.switched_program import Program
from polyattn.bench.programs.training_programs import TRAINING
from polyattn.bench.programs.vision_programs import VISION
from polyattn.bench.timing import Watch
from polyattn.bench.trace.overhead_timing import interval, summary

__all__ = ["MOST_NOISE", "PROGRAMS", "Turns", "figures", "run_row"]

AGAIN = "again"
"""Stock a second time in each round: how far it is from itself is the noise."""
MOST_NOISE = 0.1
"""How uncertain a row may be that is judged."""
_ENOUGH = 0.02
"""Half of the interval in which a ratio's median lies: rounds are added until it is that narrow."""
_LONG, _LONGEST, _FEWEST = 60.0, 240.0, 3
"""Seconds after which no round is added, and after which those asked for are cut, to three."""
_MOST_RMS = {"float32": 2e-4, "bfloat16": 0.08}
PROGRAMS: dict[str, tuple[Callable[[Any, str, int], Program], Any]] = {
    **LANGUAGE, **VISION, **TRAINING,
}  # fmt: skip


@dataclass
class Turns:
    """What was measured: seconds of each side in each round, what differed, what could not run."""

    seconds: dict[str, list[float]]
    rms: dict[str, float] = field(default_factory=dict)
    cannot: dict[str, str] = field(default_factory=dict)
    ran: Counter[str] = field(default_factory=Counter)
    foreign: float = 0.0


def run_row(
    row: ProgramRow, rounds: int, seed: int = 0, sizes: Any = None, long_s: float = _LONG
) -> dict[str, Any]:
    """Build the program, run every side in turns, and return the row of the record.

    `long_s`: the seconds after which no round is added to `rounds`.
    """
    build, usual = PROGRAMS[row.program]
    torch.compiler.reset()
    try:
        program = build(sizes or usual, row.dtype, seed)
    except ImportError as error:
        return figures(row, Turns({}, cannot={row.stock: str(error)}))
    return figures(row, _turns(row, program, rounds, long_s))


def _turns(row: ProgramRow, program: Program, rounds: int, long_s: float) -> Turns:
    found = Turns({})
    _warm_up(row, program, found)
    sides = [side for side in (*row.sides, AGAIN) if side not in found.cannot]
    found.seconds = {side: [] for side in sides}
    if row.stock in found.cannot or OURS in found.cannot:
        return found
    watch, begin, number = Watch(), time.perf_counter(), 0
    while not _is_enough(found, row, number, rounds, time.perf_counter() - begin, long_s):
        first = number % len(sides)
        for side in (*sides[first:], *sides[:first]):
            found.seconds[side].append(_timed(program, row.stock if side == AGAIN else side))
        number += 1
    found.foreign = watch.foreign()
    return found


def _is_enough(
    found: Turns, row: ProgramRow, done: int, asked: int, seconds: float, long_s: float = _LONG
) -> bool:
    """Say whether to stop: when it is known what was asked, or would take too long to know."""
    if done < asked:
        return done >= _FEWEST and seconds > _LONGEST
    stock = _stock(found, row)
    return (
        asked < _FEWEST or seconds > long_s or _half(_over(stock, found.seconds[OURS])) <= _ENOUGH
    )


def _warm_up(row: ProgramRow, program: Program, found: Turns) -> None:
    """Run every side twice, of which the first may compile; compare what they compute."""
    from polyattn import record_selections

    truth: Tensor | None = None
    for side in row.sides:
        try:
            with program.use(side), record_selections() as ran:
                out = program.step()
            _timed(program, side)
        except Exception as error:  # what a library cannot do on this machine is part of the answer
            found.cannot[side] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            continue
        truth = out if truth is None else truth
        found.rms[side] = _rms(out, truth, program.valid)
        if side == OURS:
            found.ran = Counter(selection.backend for selection in ran)


def _timed(program: Program, side: str) -> float:
    with program.use(side):
        gc.collect()
        begin = time.perf_counter()
        program.step()
        return time.perf_counter() - begin


def _rms(out: Tensor, truth: Tensor, valid: Tensor | None) -> float:
    """Return the difference's root mean square, of the spread of what stock computed."""
    if valid is not None:
        out, truth = out[valid], truth[valid]
    return float((out - truth).square().mean().sqrt() / truth.std())


def figures(row: ProgramRow, found: Turns) -> dict[str, Any]:
    """Return the row of the record. Ratios are a side's time over ours: above 1 ours is faster."""
    record: dict[str, Any] = {
        "name": row.name, "stock": row.stock, "goal": row.goal, "goal_best": row.goal_best,
        "cannot": found.cannot, "rms": {s: _said(float(f"{r:.3g}")) for s, r in found.rms.items()},
        "ran": dict(found.ran), "foreign": round(found.foreign, 4),
    }  # fmt: skip
    ours = found.seconds.get(OURS)
    if not ours:
        return {**record, "ratio": None, "met": False if OURS in found.cannot else None}
    stock = _stock(found, row)
    themselves = summary(_over(found.seconds[row.stock], found.seconds[AGAIN]))
    noise = max(abs(themselves["median"] - 1), _half(_over(stock, ours)))
    ratio = summary(_over(stock, ours))
    others = {s: summary(_over(found.seconds[s], ours)) for s in row.others if s in found.seconds}
    best = min([ratio["median"], *(one["median"] for one in others.values())])
    wrong = _wrong(row, found)
    return {
        **record, "seconds": {s: round(min(t), 5) for s, t in found.seconds.items() if s != AGAIN},
        "ratio": ratio, "others": others, "over_best": best, "noise": _said(round(noise, 4)),
        "relative": summary(_over(ours, stock)), "wrong": wrong, "rounds": len(ours),
        "met": _met(row, ratio["median"], best, noise, wrong),
    }  # fmt: skip


def _said(x: float) -> float | None:
    """Return a number that JSON has: None for the noise of too few rounds, and beside NaN."""
    return x if math.isfinite(x) else None


def _stock(found: Turns, row: ProgramRow) -> list[float]:
    """Return the stock side's time of each round, which it ran twice."""
    pairs = zip(found.seconds[row.stock], found.seconds[AGAIN], strict=True)
    return [(a + b) / 2 for a, b in pairs]


def _half(ratios: list[float]) -> float:
    """Return half the width of the interval in which their median lies, of 95 % confidence."""
    if len(ratios) < _FEWEST:
        return math.inf
    low, high = interval(ratios)
    return (high - low) / 2


def _over(one: list[float], other: list[float]) -> list[float]:
    return [a / b for a, b in zip(one, other, strict=True)]


def _wrong(row: ProgramRow, found: Turns) -> str:
    rms = found.rms.get(OURS, math.nan)
    if not rms <= _MOST_RMS[row.dtype]:
        return f"differs from stock by {rms:.1e} of its spread"
    if not found.ran:
        return "no call reached polyattn"
    return ""


def _met(row: ProgramRow, ratio: float, best: float, noise: float, wrong: str) -> bool | None:
    """Say whether the goals are met; None where that is too uncertain."""
    if wrong:
        return False
    if noise > MOST_NOISE:
        return None
    if ratio * (1 + noise) < row.goal:
        return False
    return row.goal_best is None or best * (1 + noise) >= row.goal_best
