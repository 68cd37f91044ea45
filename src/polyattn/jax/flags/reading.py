"""Reads every row as this thread sees it, and starts, sets and imports nothing for it."""

from __future__ import annotations

import enum
import sys
from typing import Any

import jax

from polyattn.flags import Knob, Row, make
from polyattn.flags.snapshot import Snapshot
from polyattn.jax.flags.checks import CHECKS
from polyattn.jax.flags.execution import EXECUTION
from polyattn.jax.flags.results import RESULTS
from polyattn.jax.flags.surroundings import QUERIES, VARIABLES, Unreadable, ask, started

__all__ = ["KNOBS", "snapshot", "table", "why_absent"]

_CONFIG = (*RESULTS, *EXECUTION, *CHECKS)
KNOBS: tuple[Knob, ...] = (*_CONFIG, *VARIABLES, *QUERIES)
"""What is known of each row, the same with every jax."""

_GONE = {"jax_default_dtype_bits": "0.10.0", "jax_safer_randint": "0.9.0"}
_NEWEST = "0.10.2"  # the jax against which the table was last gone through


def table() -> tuple[Row, ...]:
    """Return every row with how it stands in this thread now, or why it cannot be read.

    >>> rows = {row.name: row for row in table()}
    >>> rows["jax_default_matmul_precision"].knob.scope
    'thread'
    >>> with jax.default_matmul_precision("float32"):
    ...     {row.name: row for row in table()}["jax_default_matmul_precision"].value
    'float32'
    """
    values = jax.config.values
    frozen = started()
    return tuple(_row(knob, values, frozen) for knob in KNOBS)


def snapshot() -> Snapshot:
    """Return how everything stands in this thread, as plain data to store and compare.

    >>> from polyattn.jax.flags import diff
    >>> before = snapshot()
    >>> with jax.numpy_rank_promotion("raise"):
    ...     after = snapshot()
    >>> diff(before, after)
    {'jax_numpy_rank_promotion': ('allow', 'raise')}
    """
    rows = table()
    values = {row.name: row.value for row in rows if row.readable}
    return make("jax", values, {row.name: row.unreadable for row in rows if not row.readable})


def _row(knob: Knob, values: dict[str, Any], frozen: bool | None) -> Row:
    """Return the row of a knob, given all that ``jax.config`` holds for this thread."""
    unsettable = _unsettable(knob, frozen)
    try:
        if knob.where.startswith("jax.config."):
            if knob.name not in values:
                raise Unreadable(why_absent(knob))
            value = _plain(values[knob.name])
        else:
            value = ask(knob.name)
    except Unreadable as reason:
        return Row(knob, unreadable=str(reason), unsettable=unsettable)
    return Row(knob, value, unsettable=unsettable)


def _plain(value: Any) -> Any:
    """Return what jax holds as plain data: a device as ``cpu:0``, an enum as its name."""
    if isinstance(value, enum.Enum):  # before str and int, which jax's enums also are
        return value.name.lower()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "platform") and hasattr(value, "id"):
        return f"{value.platform}:{value.id}"
    raise Unreadable(f"it is a {type(value).__name__}, which is no plain data")


def why_absent(knob: Knob) -> str:
    """Say which jax has an option that this one has not."""
    here = jax.__version_info__
    gone = _GONE.get(knob.name)
    absent = f"jax {jax.__version__} does not have it"
    if knob.since and _numbers(knob.since) > here:
        return f"{absent}; jax {knob.since} does"
    if gone and _numbers(gone) <= here:
        return f"{absent}; jax before {gone} does"
    if knob.name.startswith("jax_pallas_") and "jax.experimental.pallas" not in sys.modules:
        return f"jax {jax.__version__} has it once jax.experimental.pallas is imported"
    return f"{absent}; jax {_NEWEST} does"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _unsettable(knob: Knob, frozen: bool | None) -> str:
    """Say how a knob is set: never from here."""
    if knob.kind == "query":
        return "it says how things are"
    if knob.name.startswith("env."):
        return "set it before Python starts; XLA reads it once"
    if knob.freezes and frozen:
        return "it is read when the backends are initialized, and they are"
    return f"polyattn only reads jax: use jax.config.update({knob.name!r}, ...)"
