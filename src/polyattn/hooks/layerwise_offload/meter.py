"""What offload measures while it runs: of each unit its copies, waits and computation."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from polyattn.hooks.layerwise_offload.devices import Carrier, Fetch

__all__ = ["Event", "Meter", "UnitTimes"]

_MOST_EVENTS = 4096


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
    _open: dict[int, Any] = field(default_factory=dict)
    _stamps: list[tuple[int, Any, Any]] = field(default_factory=list)
    _pass: Any = None

    def begin(self) -> None:
        """A pass begins."""
        self._pass = self.carrier.stamp()

    def end(self) -> None:
        """A pass is over."""
        if self._pass is not None:
            self._stamps.append((-1, self._pass, self.carrier.stamp()))
            self._pass = None
        if len(self._stamps) > _MOST_EVENTS:
            self.resolve()

    def used(self, unit: int, fetch: Fetch | None, stood: float, missed: bool) -> None:
        """A unit is used now; its slot was being filled by `fetch`, if this use is the first."""
        times = self.units[unit]
        times.uses += 1
        times.misses += missed
        times.stall_s += stood
        self.outside += missed and self._pass is None
        now = self.carrier.stamp()
        if isinstance(now, float) and stood > 0:
            self._note(Event("wait", unit, now - stood, now))
        if fetch is not None and not fetch.counted and fetch.seconds is not None:
            fetch.counted = True
            times.fetches += 1
            times.nbytes += fetch.nbytes
            times.copy_s += fetch.seconds
            self._note(Event("copy", unit, fetch.began, fetch.began + fetch.seconds))
        self._open[unit] = now

    def left(self, unit: int) -> None:
        """A use of a unit is over."""
        begin = self._open.pop(unit, None)
        if begin is not None:
            self._stamps.append((unit, begin, self.carrier.stamp()))

    def resolve(self) -> None:
        """Turn the stamps into seconds."""
        for unit, begin, end in self._stamps:
            seconds = self.carrier.seconds(begin, end)
            if unit < 0:
                self.passes += 1
                self.pass_s += seconds
            else:
                self.units[unit].compute_s += seconds
            if isinstance(begin, float):
                self._note(Event("pass" if unit < 0 else "compute", unit, begin, end))
        self._stamps.clear()

    def reset(self) -> None:
        """Begin anew: what was measured so far no longer counts."""
        self.units.clear()
        self.events.clear()
        self._stamps.clear()
        self.passes, self.pass_s, self.bytes_written_back, self.outside = 0, 0.0, 0, 0

    def _note(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) > 2 * _MOST_EVENTS:
            del self.events[:_MOST_EVENTS]
