"""A call in both runs: its two events, and how far their tensors are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from polyattn.trace.compare.alignment import Match
from polyattn.trace.compare.distance import Distance
from polyattn.trace.compare.frames import Frame
from polyattn.trace.compare.thresholds import Limit
from polyattn.trace.format.record import Record

__all__ = ["Called", "Event", "Tensor"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Two records that are the same tensor. `main`: the first of its event that is rounded."""

    a: Record
    b: Record
    distance: Distance
    limit: Limit
    main: bool
    eps: float

    @property
    def ratio(self) -> float:
        """The error in units of the threshold: above 1 is a difference."""
        error, limit = self.distance.error, self.limit
        if not self.distance.comparable:
            return 0.0
        if limit.coherent(self.distance, self.a, self.eps):
            return max(1.0 + 1e-9, error / limit.value) if limit.value else math.inf
        return error / limit.value if limit.value else (math.inf if error else 0.0)


@dataclass(eq=False, slots=True)
class Event:
    """What went into a call, or came out of it, in both runs. `at`: when, in the port's order.

    `status`: what the walk makes of it: same, grown, cannot say, differs, or none, not compared.
    `drift`: in an isolated run how many calls that were not fed went into it, else None.
    """

    call: Called
    out: bool
    at: float
    tensors: list[Tensor] = field(default_factory=list)
    status: str = "none"
    drift: int | None = None

    @property
    def compared(self) -> bool:
        """Whether any tensor of it could be compared."""
        return any(one.distance.comparable for one in self.tensors)

    @property
    def worst(self) -> Tensor | None:
        """The tensor that is furthest above its threshold."""
        known = [one for one in self.tensors if one.distance.comparable]
        return max(known, key=lambda one: one.ratio, default=None)

    @property
    def error(self) -> float | None:
        """The error of the worst tensor."""
        worst = self.worst
        return None if worst is None else worst.distance.error

    @property
    def agrees(self) -> bool:
        """Whether all that is compared is within its threshold."""
        return self.compared and all(one.ratio <= 1 for one in self.tensors)


@dataclass(eq=False, slots=True)
class Called:
    """A call of a match in both runs, with its two events."""

    match: Match
    a: Frame
    b: Frame
    ins: Event = field(init=False)
    outs: Event = field(init=False)

    def __post_init__(self) -> None:
        self.ins = Event(self, False, self.b.first)
        self.outs = Event(self, True, self.b.last)

    def events(self) -> Iterator[Event]:
        """What was recorded of both: inputs, then outputs."""
        yield from (event for event in (self.ins, self.outs) if event.tensors)
