"""Calibrating a machine of which no record is shipped: some milliseconds, once.

For each kind of problem the native kernels and torch's run a few small calls by turns
(see `comparing`). What comes to no result leaves torch's kernel in place, is not kept, and is tried
again by a later call.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from polyattn import settings
from polyattn.errors import PolyattnError
from polyattn.forks import kept_free
from polyattn.problem import Problem
from polyattn.selection import Accepted, Selection, Source, scopes
from polyattn.selection.backend import FAULTS
from polyattn.selection.evidence import of_machine
from polyattn.selection.evidence.calibrated_rows import entries_of
from polyattn.selection.evidence.comparing import BUSY, Compared, compare
from polyattn.selection.evidence.figures import Evidence, Figure
from polyattn.selection.evidence.problem_kinds import (
    UNCALIBRATED,
    WIDER,
    is_small,
    is_small_training,
    kind_of,
    kinds_beside,
    work_of,
)
from polyattn.selection.platforms import Probe, Prober, find_platform
from polyattn.tuning import Key, Measurement, TuningTable

__all__ = ["CALIBRATED_FROM", "calibrate", "wanted"]

CALIBRATED_FROM = 1 << 24
"""The work of a class from which a call may calibrate: about 0.2 ms. Smaller ones cannot wait."""

_SESSION_S, _WRITE_S = 0.15, 0.2
_OWN = frozenset({"sdpa_flash", "sdpa_math"})

_lock = kept_free(threading.Lock())
_in_vain: set[tuple[str, str]] = set()


def wanted(selection: Selection, problem: Problem, evidence: Evidence) -> bool:
    """Say whether a choice would rest on a figure that is not known yet.

    It is noted then, so that the choice is made again where another call finds the figure.
    """
    if selection.source is not Source.HEURISTIC or problem.device != "cpu":
        return False
    if is_small(problem) or is_small_training(problem) or selection.backend == "native_cpu":
        return False
    if evidence.figure(problem) is not None:
        return False
    kind = kind_of(problem)
    key = problem.dtype, WIDER[kind] if kind in UNCALIBRATED else kind
    able = {name for name, one in selection.decisions.items() if isinstance(one, Accepted)}
    if "native_cpu" not in able or able.isdisjoint(_OWN):
        return False
    _in_vain.add(key)
    return True


def calibrate(problem: Problem) -> bool:
    """Calibrate this machine for the problem's dtype and the kinds beside its own, if that may be.

    Returns whether more is known now. Not for compiled or small calls, not where the framework is
    in the middle of something (`Prober.refusal`), not in two threads at once.
    """
    platform = find_platform(problem.framework)
    if (
        platform is None
        or platform.prober is None
        or of_machine.is_assumed()
        or problem.compiled
        or work_of(problem) < CALIBRATED_FROM
        or not settings.current().calibration
    ):
        return False
    if platform.prober.refusal() is not None or not _lock.acquire(blocking=False):
        return False
    try:
        return _calibrated(platform.prober, problem)
    finally:
        _lock.release()


def _calibrated(prober: Prober, problem: Problem) -> bool:
    place = of_machine.place_of(problem.framework)
    known = of_machine.this_machine(problem.framework)
    dtype, kinds = problem.dtype, kinds_beside(kind_of(problem))
    if place is None or not of_machine.kept.may_try(place, dtype, kinds[0]):
        return False
    figures: dict[tuple[str, str], Figure] = {}
    undecided: dict[tuple[str, str], str] = {}
    entries: list[tuple[Key, Measurement]] = []
    begin = time.monotonic()
    with prober.quiet():
        for kind in kinds:
            if (dtype, kind) in known.figures:
                continue
            if time.monotonic() - begin > _SESSION_S or BUSY in undecided.values():
                undecided[dtype, kind] = BUSY
                continue
            patience = 2 if figures else 1
            found = _compared(prober, dtype, kind, place.machine.threads or 1, patience)
            if isinstance(found, str):
                undecided[dtype, kind] = found
                continue
            probe, result = found
            figures[dtype, kind] = result.figure
            entries += entries_of(
                probe.problem, kind, probe.rival, result.native_s, result.figure, result.pairs,
                probe.error, probe.tolerance, place.device, place.versions,
            )  # fmt: skip
    of_machine.kept.add(place, figures, undecided)
    _write(entries)
    _select_again(problem)
    return True


def _compared(
    prober: Prober, dtype: str, kind: str, threads: int, patience: int
) -> tuple[Probe, Compared] | str:
    """Compare both kernels on one kind; or say why that gave no result."""
    try:
        probe = prober.probe(dtype, kind)
        if not probe.error <= probe.tolerance:
            return f"not calibrated: native_cpu and {probe.rival} differ by {probe.error:.1e}"
        found = compare(probe.native, probe.theirs, threads, patience=patience)
    except FAULTS as error:  # a kernel's, which is no fault of the call that is chosen for
        return f"not calibrated: {type(error).__name__}: {error}"
    return found if isinstance(found, str) else (probe, found)


def _write(entries: list[tuple[Key, Measurement]]) -> None:
    """Keep the rows for later processes, where they can be written at once: nobody waits here."""
    if not entries:
        return
    path = settings.current().cache_dir / "tuning.sqlite3"
    with suppress(PolyattnError, OSError), TuningTable(path, busy_timeout_s=_WRITE_S) as table:
        table.record_all(entries)


def _select_again(problem: Problem) -> None:
    """Forget the choices that were made without a figure, if one of them would be another now."""
    known = of_machine.this_machine(problem.framework).figures
    asked = {key for key in list(_in_vain) if key[0] == problem.dtype and key in known}
    _in_vain.difference_update(asked)
    if any(known[key].prefers_native for key in asked):
        scopes.invalidate()
