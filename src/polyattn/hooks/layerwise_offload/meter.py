"""What offload measures while it runs: of each unit its copies, waits and computation."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from polyattn.hooks.layerwise_offload.devices import Carrier, Fetch

__all__ = ["Event", "Meter", "UnitTimes"]

_MOST_EVENTS = 4096
_SHORTEST = 2e-5  # less is not seen in a picture, and is what it takes not to wait


@dataclass(slots=True)
class UnitTimes:
    """Sums over the uses of a unit, in seconds and bytes."""

    uses: int = 0
    fetches: int = 0
    misses: int = 0
    nbytes: int = 0
    copy_s: float = 0.0
    stall_s: float = 0.0
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time: a unit's copy, wait or computation, from when to when."""

    what: str
    unit: int
    begin: float
    end: float


class _Span(NamedTuple):
    """Something between two stamps, not yet in seconds; a pass is of the unit -1."""

    what: str
    unit: int
    begin: Any
    end: Any


@dataclass
class Meter:
    """The sums, and the events of the last passes for a picture."""

    carrier: Carrier
    units: dict[int, UnitTimes] = field(default_factory=lambda: defaultdict(UnitTimes))
    passes: int = 0
    pass_s: float = 0.0
    slots_added: int = 0
    slots_given_up: int = 0
    bytes_added: int = 0
    bytes_written_back: int = 0
    outside: int = 0
    events: list[Event] = field(default_factory=list)
    _spans: deque[_Span] = field(default_factory=deque)
    _fetches: deque[tuple[int, Fetch]] = field(default_factory=deque)
    _pass: Any = None

    def begin(self) -> None:
        """A pass begins."""
        self._pass = self.carrier.stamp()

    def end(self) -> None:
        """A pass is over."""
        if self._pass is not None:
            self._spans.append(_Span("pass", -1, self._pass, self.carrier.stamp()))
            self._pass = None
        if len(self._spans) > _MOST_EVENTS:  # the older half is over on any device
            self._resolve(len(self._spans) // 2, len(self._fetches) // 2)

    def used(self, unit: int, fetch: Fetch | None, asked: Any, missed: bool) -> Any:
        """A unit is used from now on, which is returned; `asked`: before it was waited for.

        `fetch` filled its slot, if this is the first use of that.
        """
        times = self.units[unit]
        times.uses += 1
        times.misses += missed
        self.outside += missed and self._pass is None
        now = self.carrier.stamp()
        self._spans.append(_Span("wait", unit, asked, now))
        if fetch is not None and not fetch.counted:
            fetch.counted = True
            self._fetches.append((unit, fetch))
        return now

    def left(self, unit: int, began: Any) -> None:
        """A use of a unit is over, that began at a stamp."""
        if began is not None:
            self._spans.append(_Span("compute", unit, began, self.carrier.stamp()))

    def resolve(self) -> None:
        """Turn all stamps into seconds; waits until the device is there."""
        self._resolve(len(self._spans), len(self._fetches))

    def _resolve(self, spans: int, fetches: int) -> None:
        for _ in range(spans):
            span = self._spans.popleft()
            seconds = self.carrier.seconds(span.begin, span.end)
            self._add(span.what, span.unit, self.carrier.when(span.begin), seconds)
        for _ in range(fetches):
            unit, fetch = self._fetches.popleft()
            began, seconds = self.carrier.copied(fetch)
            self.units[unit].fetches += 1
            self.units[unit].nbytes += fetch.nbytes
            self._add("copy", unit, began, seconds)

    def _add(self, what: str, unit: int, began: float, seconds: float) -> None:
        if what == "pass":
            self.passes += 1
            self.pass_s += seconds
        elif what == "wait":
            self.units[unit].stall_s += seconds
        elif what == "compute":
            self.units[unit].compute_s += seconds
        else:
            self.units[unit].copy_s += seconds
        if seconds > _SHORTEST:
            self.events.append(Event(what, unit, began, began + seconds))
        if len(self.events) > 2 * _MOST_EVENTS:
            del self.events[:_MOST_EVENTS]

    def reset(self) -> None:
        """Begin anew: what was measured so far no longer counts."""
        self.units.clear()
        self.events.clear()
        self._spans.clear()
        self._fetches.clear()
        self.passes, self.pass_s, self.bytes_written_back, self.outside = 0, 0.0, 0, 0
