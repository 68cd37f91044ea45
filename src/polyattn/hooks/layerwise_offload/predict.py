"""What a pass will take: copies beside computation, simulated unit by unit; and its bound.

A unit is computed when the one before it is done and its own copy is; a copy begins when the link
is free and a slot is. With one slot ahead this is T = sum of max(compute, copy of the next).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Prediction", "Step", "predict"]


@dataclass(frozen=True, slots=True)
class Step:
    """One use of a unit in a pass, in seconds; `copy_s` is 0 for one that stays."""

    compute_s: float
    copy_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a pass: as predicted, computation alone, copies alone."""

    pass_s: float
    compute_s: float
    copy_s: float

    @property
    def bound_s(self) -> float:
        """What no order can beat: the longer of the two."""
        return max(self.compute_s, self.copy_s)

    @property
    def slowdown(self) -> float:
        """How many times as long as if everything were resident."""
        return self.pass_s / self.compute_s if self.compute_s else float("inf")

    @property
    def over_bound(self) -> float:
        """How many times as long as the bound."""
        return self.pass_s / self.bound_s if self.bound_s else 1.0


def predict(steps: Sequence[Step], depth: int, outside_s: float = 0.0) -> Prediction:
    """Simulate a pass over the uses of units, with `depth` slots filled ahead.

    `outside_s`: what is computed outside the units, at the end of the pass.

    >>> predict([Step(1.0, 0.5)] * 4, depth=1).pass_s  # only the first copy is waited for
    4.5
    >>> predict([Step(0.5, 1.0)] * 4, depth=1).pass_s  # four copies, then the last computation
    4.5
    """
    copies = [step.copy_s for step in steps if step.copy_s > 0]
    filled: list[float] = []  # when each copy is over, in order
    now, entered = 0.0, 0

    def issue(count: int) -> None:
        while len(filled) < min(count, len(copies)):
            begin = max(now, filled[-1] if filled else 0.0)
            filled.append(begin + copies[len(filled)])

    issue(depth)
    for step in steps:
        if step.copy_s > 0:
            entered += 1
            issue(entered + depth)  # its own slot, and those ahead: the others have been left
            now = max(now, filled[entered - 1])
        now += step.compute_s
    return Prediction(
        now + outside_s,
        sum(step.compute_s for step in steps) + outside_s,
        sum(step.copy_s for step in steps),
    )
