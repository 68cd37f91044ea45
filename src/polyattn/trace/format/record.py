"""A record: one tensor at one place of one call, as one line of a trace.

Statistics that a run did not collect are absent in the file and None here. Names that this version
does not know are kept in `extra`, so that a file of the same schema may carry more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from polyattn.errors import TraceError
from polyattn.trace.format import field_checks as checks
from polyattn.trace.format.field_checks import Malformed
from polyattn.trace.format.jsonline import compact, exact
from polyattn.trace.statistics.schema import (
    DEFAULT_STATISTICS,
    MOMENTS,
    SORTS,
    STATISTICS,
    Statistics,
)
from polyattn.trace.statistics.sketch_text import unpack

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "DEFAULT_STATISTICS", "MOMENTS", "PHASES", "STATISTICS", "UNKNOWN", "WIDE", "Record",
    "line_of", "parse_record",
]  # fmt: skip

UNKNOWN = "unknown"
"""The dtype of what could not be read."""

PHASES = ("in", "out", "grad_in", "grad_out", "param")

WIDE = frozenset({"float64", "complex128", "int64", "uint64", "longdouble", "float128"})
"""Dtypes whose numbers are written with all their digits."""

_PLACED = ("global_shape", "start", "partial")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Statistics):
    """One line of a trace; see ``docs/trace-format.md`` for each field.

    `errors`: what the statistics that could not be computed said, by name. `extra`: what this
    version does not know. `buckets()`: the sketch as numbers.
    """

    seq: int
    module: str
    phase: str
    tensor: str
    cls: str = ""
    call: int = 0
    step: int | None = None
    rank: int = 0
    same: int | None = None
    global_shape: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None
    partial: bool = False
    file: str | None = None
    forced: bool = False
    form: bool = False
    errors: Mapping[str, str] = field(default_factory=dict)
    noise: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, int | None, str, str]:
        """What it is of, on any rank: module, call, step, phase, tensor."""
        return self.module, self.call, self.step, self.phase, self.tensor

    @property
    def bad(self) -> int | None:
        """How many elements are NaN or infinite; None where they were not counted."""
        if self.nan is None or self.pinf is None or self.ninf is None:
            return None
        return self.nan + self.pinf + self.ninf

    @property
    def identity(self) -> tuple[object, ...]:
        """What two records of one tensor have in common, and hardly those of two."""
        return self.n, self.sketch, self.min, self.max, self.l2

    def buckets(self) -> NDArray[np.float64] | None:
        """Return the sketch as 64 float64, or None if there is none."""
        if self.sketch is None:
            return None
        from polyattn.trace.statistics.sketch import (
            decode,  # NumPy is loaded when numbers are asked for
        )

        return decode(self.sketch)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without what is absent; :func:`parse_record` reads it."""
        found: dict[str, Any] = {}
        for name in _NAMES:
            value = getattr(self, name)
            if name == "step" or not (value is None or (name in _DEFAULTS and not value)):
                found[name] = _plain(value)
        return found | dict(self.extra)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


_OF = ("seq", "module", "phase", "tensor", "cls", "call", "step", "rank")
_NAMES = (
    *_OF,
    *(one.name for one in fields(Record) if one.name not in _OF and one.name != "extra"),
)
_DEFAULTS = frozenset({"cls", "rank", "partial", "forced", "form", "errors"})
_KNOWN = frozenset(_NAMES)


def line_of(record: Mapping[str, Any]) -> str:
    """Return a record as a line of JSON without its newline; floats have the digits they need.

    9 digits hold every float32; records of float64, complex128 and 64-bit integers have all 17.
    """
    return (exact if record.get("dtype") in WIDE else compact)(record)


def parse_record(raw: Mapping[str, Any], same: Mapping[int, Record] | None = None) -> Record:
    """Return the record that a line holds; raise :class:`Malformed` with the reason if it is none.

    `same`: the records before it by `seq`, for one that refers to an earlier, identical tensor.
    """
    seq = checks.integer(raw.get("seq"), "seq")
    values: dict[str, Any] = {"seq": seq}
    for name in ("module", "tensor"):
        values[name] = checks.text(raw.get(name), name)
    values["phase"] = raw.get("phase")
    if values["phase"] not in PHASES:
        raise Malformed(f"phase {checks.short(values['phase'])}, not one of {', '.join(PHASES)}")
    values["cls"] = checks.text(raw.get("cls", ""), "cls")
    values["call"] = checks.integer(raw.get("call", 0), "call")
    values["rank"] = checks.integer(raw.get("rank", 0), "rank")
    if raw.get("step") is not None:
        values["step"] = checks.integer(raw["step"], "step", -checks.LARGEST_SIZE)
    if raw.get("same") is not None:
        values |= _inherited(checks.integer(raw["same"], "same"), seq, same or {})
    _take_statistics(raw, values)
    _take_place(raw, values)
    if raw.get("errors"):
        said = checks.table(raw["errors"], "errors").items()
        values["errors"] = {checks.text(k, "errors"): checks.text(v, "errors") for k, v in said}
    extra = {name: checks.plain(raw[name], name) for name in raw.keys() - _KNOWN}
    return Record(**values, extra=extra)


def _inherited(same: int, seq: int, earlier: Mapping[int, Record]) -> dict[str, Any]:
    of = earlier.get(same)
    if of is None:
        raise Malformed(f"same {same} in record {seq}, and no earlier line has that seq")
    names = (*STATISTICS, *_PLACED)
    return {"same": same} | {name: getattr(of, name) for name in names}


def _take_statistics(raw: Mapping[str, Any], values: dict[str, Any]) -> None:
    if "shape" in raw or "same" not in values:
        values["shape"] = checks.shape(raw.get("shape"), "shape")
    if "dtype" in raw or "same" not in values:
        values["dtype"] = checks.text(raw.get("dtype"), "dtype", 64)
    size = math.prod(values["shape"]) * (2 if values["dtype"].startswith("complex") else 1)
    values["n"] = checks.integer(raw.get("n", size), "n")
    if values["n"] != size:
        raise Malformed(f"n {values['n']} for the shape {list(values['shape'])} ({size} elements)")
    for name in SORTS:
        if raw.get(name) is not None:
            values[name] = checks.integer(raw[name], name)
    if sum(values.get(name) or 0 for name in SORTS) > size:
        raise Malformed(f"more NaN, infinite and zero elements than its {size}")
    for name in MOMENTS:
        if name in raw:
            values[name] = checks.number(raw[name], name)
    if raw.get("samples") is not None:
        if type(raw["samples"]) is not list or len(raw["samples"]) > 64:
            raise Malformed(f"samples {checks.short(raw['samples'])}, not a list of at most 64")
        values["samples"] = tuple(checks.number(one, "samples") for one in raw["samples"])
    if raw.get("sketch") is not None:
        try:
            unpack(raw["sketch"])
        except TraceError as error:
            raise Malformed(f"a sketch that is none: {error}") from error
        values["sketch"] = raw["sketch"]


def _take_place(raw: Mapping[str, Any], values: dict[str, Any]) -> None:
    if raw.get("global_shape") is not None:
        whole = checks.shape(raw["global_shape"], "global_shape")
        first = checks.shape(raw.get("start", [0] * len(whole)), "start")
        box, values["global_shape"], values["start"] = values["shape"], whole, first
        fits = len(box) == len(whole) == len(first) and all(
            a + n <= size for a, n, size in zip(first, box, whole, strict=True)
        )
        if not fits:
            raise Malformed(f"shape {list(box)} from {list(first)}, not within {list(whole)}")
    elif raw.get("start") is not None:
        raise Malformed("a start without global_shape")
    if "partial" in raw:
        values["partial"] = checks.boolean(raw["partial"], "partial")
    for name in ("forced", "form"):
        if name in raw:
            values[name] = checks.boolean(raw[name], name)
    if raw.get("noise") is not None:
        values["noise"] = checks.number(raw["noise"], "noise")
        if values["noise"] < 0:
            raise Malformed(f"noise {values['noise']}, expected a relative error, 0 or more")
    if raw.get("file") is not None:
        values["file"] = _file(checks.text(raw["file"], "file", 512))


def _file(name: str) -> str:
    """A file of the trace's own folder or below it, on any system."""
    steps = name.split("/")
    if any(step in ("", ".", "..") for step in steps) or not name.isprintable() or "\\" in name:
        raise Malformed(f"file {checks.short(name)}, not a path below the trace's folder")
    if ":" in name:
        raise Malformed(f"file {checks.short(name)} with a colon, which names a drive elsewhere")
    return name
