"""Calibrated figures as rows of the tuning table, and back.

Two rows for each kind, under the problem that was timed and a device of their own, so that they
are never taken for times of a problem: of native_cpu, and of torch's kernel, whose times are those
of native_cpu times the ratio, its low and its high.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from polyattn.problem import Problem
from polyattn.selection.evidence.figures import Figure
from polyattn.selection.evidence.problem_kinds import DTYPES, KINDS
from polyattn.tuning import Key, Measurement

__all__ = ["device_of", "entries_of", "figures_of"]

NATIVE, PREFIX = "native_cpu", "calibration of "
SOURCE = "measured here (calibration)"


def device_of(device: str) -> str:
    """Return the device under which calibrations of a device are kept."""
    return PREFIX + device


def entries_of(
    problem: Problem,
    kind: str,
    rival: str,
    native_s: float,
    figure: Figure,
    pairs: int,
    error: float,
    tolerance: float,
    device: str,
    versions: str,
) -> list[tuple[Key, Measurement]]:
    """Return the rows of one figure. `rival`: torch's backend; `native_s`: the native time."""
    key = Key(device_of(device), versions, problem.to_json())
    config = json.dumps({"calibration": kind, "dtype": problem.dtype})
    times = {NATIVE: (native_s,) * 3} | {
        rival: (native_s * figure.median, native_s * figure.low, native_s * figure.high)
    }
    return [
        (key, Measurement(name, config, *seconds, pairs, error, tolerance, error <= tolerance))
        for name, seconds in times.items()
    ]


def figures_of(stored: Mapping[str, list[Measurement]]) -> dict[tuple[str, str], Figure]:
    """Return the figures that rows hold; what is not of a calibration is passed over."""
    found: dict[tuple[str, str], Figure] = {}
    for rows in stored.values():
        native = next((one for one in rows if one.backend == NATIVE), None)
        rival = next((one for one in rows if one.backend != NATIVE), None)
        if native is None or rival is None or native.config != rival.config:
            continue
        told = json.loads(native.config)
        if not isinstance(told, dict):
            continue
        dtype, kind = told.get("dtype"), told.get("calibration")
        if dtype in DTYPES and isinstance(kind, str) and kind in KINDS:
            unit = native.median_s
            low, median, high = rival.min_s / unit, rival.median_s / unit, rival.max_s / unit
            found[dtype, kind] = Figure(low, median, high, SOURCE)
    return found
