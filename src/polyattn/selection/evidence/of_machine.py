"""The evidence in force: of this machine, or of one that facts tell of.

Of this machine: the shipped record that fits it, then what was calibrated here
(see `calibration`), in this process or kept in the tuning table by an earlier one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from polyattn import settings
from polyattn.problem.machine import Facts
from polyattn.selection import scopes
from polyattn.selection.evidence.calibrated_rows import device_of, figures_of
from polyattn.selection.evidence.figures import UNMEASURED, Evidence, Figure
from polyattn.selection.evidence.shipped import Record, find
from polyattn.selection.platforms import Prober, find_platform
from polyattn.selection.processor_kind import Machine
from polyattn.tuning import Measurement, lookup

__all__ = ["Place", "assume", "this_machine", "kept", "place_of", "is_assumed", "told"]


@dataclass(frozen=True)
class Place:
    """This machine as times are kept of it: itself, and the device and versions of the keys."""

    machine: Machine
    device: str
    versions: str


class Kept:
    """What this process has calibrated, by place; also what came to no result, and why."""

    def __init__(self) -> None:
        self.figures: dict[Place, dict[tuple[str, str], Figure]] = {}
        self.undecided: dict[Place, dict[tuple[str, str], str]] = {}
        self.version = 0
        self._tries: dict[tuple[Place, str, str], tuple[int, float]] = {}

    def may_try(self, place: Place, dtype: str, kind: str) -> bool:
        """Say whether to calibrate, and note the try: a few of them, ever farther apart."""
        count, last = self._tries.get((place, dtype, kind), (0, -math.inf))
        now = time.monotonic()
        if count >= _TRIES or now - last < _AGAIN_S * 4 ** (count - 1):
            return False
        self._tries[place, dtype, kind] = count + 1, now
        return True

    def add(
        self,
        place: Place,
        figures: Mapping[tuple[str, str], Figure],
        undecided: Mapping[tuple[str, str], str],
    ) -> None:
        """Take the results of a calibration."""
        self.figures.setdefault(place, {}).update(figures)
        self.undecided[place] = {
            key: why
            for key, why in (self.undecided.get(place, {}) | dict(undecided)).items()
            if key not in self.figures[place]
        }
        self.version += 1

    def forget(self) -> None:
        """Forget all of it, as a new process has."""
        self.__init__()  # type: ignore[misc]


_TRIES, _AGAIN_S = 5, 2.0
kept = Kept()
_NONE: Mapping[str, list[Measurement]] = {}
_assumed: Evidence | None = None
_made: tuple[Place | None, Mapping[str, list[Measurement]], int, Evidence] = (
    None,
    {},
    0,
    UNMEASURED,
)


def this_machine(framework: str = "torch") -> Evidence:
    """Return what is known of this machine's kernels for a framework, without measuring.

    >>> isinstance(this_machine("torch"), Evidence)
    True
    """
    global _made
    if _assumed is not None:
        return _assumed
    place = place_of(framework)
    if place is None:
        return UNMEASURED
    rows = _NONE
    if settings.current().calibration:
        rows = lookup.stored(device_of(place.device), place.versions)
    if _made[0] == place and _made[1] is rows and _made[2] == kept.version:
        return _made[3]
    version = kept.version
    made = _evidence(place, find(place.machine), rows)
    _made = place, rows, version, made
    return made


def _evidence(
    place: Place, record: Record | None, rows: Mapping[str, list[Measurement]]
) -> Evidence:
    figures = figures_of(rows)
    if settings.current().calibration:
        figures |= kept.figures.get(place, {})
    return Evidence(
        figures | (record.figures_for(place.machine) if record else {}),
        undecided=kept.undecided.get(place, {}),
        record=record.name if record else None,
    )


def place_of(framework: str) -> Place | None:
    """Return this machine as times are kept of it; None for a framework without a prober."""
    platform = find_platform(framework)
    prober: Prober | None = None if platform is None else platform.prober
    if platform is None or prober is None:
        return None
    machine = prober.machine()
    return Place(machine, platform.device_description("cpu"), platform.versions())


def told(facts: Facts) -> Evidence:
    """Return what the shipped records say of a machine that one does not have.

    >>> told(Facts.parse("sapphirerapids")).record
    'intel-amx'
    >>> print(told(Facts.parse("graviton3")).lacking)
    no record of such a machine is shipped
    """
    record = find(Machine.told(facts))
    if record is None:
        return Evidence(lacking="no record of such a machine is shipped")
    lacking = f"the record of such a machine ({record.name}) has no such problem"
    return Evidence(record.figures, lacking, record=record.name)


@contextmanager
def assume(evidence: Evidence) -> Iterator[None]:
    """Let choices on this machine rest on given evidence, and nothing be calibrated meanwhile.

    >>> with assume(UNMEASURED):
    ...     this_machine("torch") is UNMEASURED
    True
    """
    global _assumed
    before = _assumed
    _assumed = evidence
    scopes.invalidate()
    try:
        yield
    finally:
        _assumed = before
        scopes.invalidate()


def is_assumed() -> bool:
    """Whether evidence was given by :func:`assume`."""
    return _assumed is not None
