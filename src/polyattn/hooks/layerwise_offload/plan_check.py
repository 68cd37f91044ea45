"""Whether what was read from a file is a plan: every field of its kind, and possible."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["UNREADABLE", "check_plan"]

UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading a text raises that is not what it should be; the last: lists within lists."""

_TIERS = ("resident", "host", "disk")
_MOST_READERS = 64
_BYTES = ("outside_bytes", "other_bytes", "activation_bytes", "peak_bytes")


def check_plan(plan: Any) -> None:
    """Raise ValueError for the first field of an OffloadPlan that is wrong."""
    _require("device", plan.device, isinstance(plan.device, str) and bool(plan.device))
    _require("depth", plan.depth, _is_count(plan.depth) and plan.depth >= 1)
    for name in _BYTES:
        _require(name, getattr(plan, name), _is_count(getattr(plan, name)))
    _require(
        "budget_bytes", plan.budget_bytes, plan.budget_bytes is None or _is_count(plan.budget_bytes)
    )
    _require("readers", plan.readers, _is_count(plan.readers) and plan.readers <= _MOST_READERS)
    for name in ("compute_s", "copy_s", "pass_s"):
        _require(name, getattr(plan, name), _is_time(getattr(plan, name)))
    _require("beside_held", plan.beside_held, isinstance(plan.beside_held, bool))
    rates = isinstance(plan.rates, dict) and all(
        _is_time(rate) and rate for rate in plan.rates.values()
    )
    _require("rates", plan.rates, rates)
    for unit in plan.units:
        _check_unit(unit)
    names = [unit.name for unit in plan.units]
    _require("units", names, len(set(names)) == len(names))
    places = all(_is_count(index) and index < len(names) for index in plan.order)
    _require("order", plan.order, places)


def _check_unit(unit: Any) -> None:
    _require("a unit's name", unit.name, isinstance(unit.name, str) and bool(unit.name))
    _require(f"tier of {unit.name}", unit.tier, unit.tier in _TIERS)
    _require(f"nbytes of {unit.name}", unit.nbytes, _is_count(unit.nbytes))
    for name in ("compute_s", "copy_s"):
        _require(f"{name} of {unit.name}", getattr(unit, name), _is_time(getattr(unit, name)))


def _require(name: str, value: Any, fits: bool) -> None:
    if not fits:
        raise ValueError(f"its {name} is {value!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _is_time(value: Any) -> bool:
    """Whether it is a number of seconds, or none."""
    if value is None:
        return True
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0
