"""The one schema of what a trace says of a tensor: its names, order, sizes and meaning.

A statistic is a field of :class:`Statistics`, and nothing else names it but its formulas. From the
fields follow those of a record, the places in the row of float64 numbers that kernels write, how
the parts of several ranks are joined, and, by ``scripts/statistics_schema.py``, the C++ enumeration
and the table in ``docs/trace-format.md``. This needs nothing but the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, Literal, NamedTuple

__all__ = [
    "BUCKETS", "COUNTS", "DEFAULT_STATISTICS", "ELEMENTS", "FIELDS", "LARGEST", "LAYOUT",
    "LEAST_PLAIN", "MOMENTS", "MOST_PLAIN", "PLACES", "REMEMBERED", "SAMPLED", "SAMPLES", "SCHEMA",
    "SKETCH", "SORTS", "STATISTICS", "WIDTH", "Kind", "Parts", "Row", "Statistics",
]  # fmt: skip

SAMPLED = 8
"""How many elements are kept as they are."""

BUCKETS = 64
"""The numbers of a sketch; as many as a word has bits, for each bit is an element's sign."""

LEAST_PLAIN, MOST_PLAIN = 2.0**-64, 2.0**127
"""A sketch whose largest bucket is from the one to below the other is written without a scale."""

REMEMBERED = 4096
"""Latest tensors among which every writer of lines looks for an identical one."""

ELEMENTS = {
    "float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "int8": "i8",
    "uint8": "u8", "int16": "i16", "int32": "i32", "int64": "i64",
}  # fmt: skip
"""The dtypes that the native kernel reads, in the order of its codes, and its names for them."""

LARGEST = math.ldexp(1.0 - 2.0**-53, 1024)
"""What stands for a number that would pass the range of float64."""

Kind = Literal["fact", "count", "moment", "samples", "sketch"]
"""A fact is known without reading elements. A count is an integer. A moment is a number of the
finite elements: null in a record and NaN in a row where there are none, as samples are."""

Parts = Literal["", "sum", "smallest", "largest", "norm", "mean", "deviation"]
"""How numbers of parts become that of the whole: means by their elements, norms by squares."""

_WIDTHS: Mapping[Kind, int] = {
    "fact": 0, "count": 1, "moment": 1, "samples": SAMPLED, "sketch": BUCKETS,
}  # fmt: skip


class Row(NamedTuple):
    """One statistic: `about` is what the documents say, `default` whether nobody has to ask."""

    name: str
    kind: Kind
    about: str
    parts: Parts
    default: bool

    @property
    def width(self) -> int:
        """How many numbers of a row it is."""
        return _WIDTHS[self.kind]


def _row(
    kind: Kind, about: str, parts: Parts = "", default: bool = True
) -> Mapping[str, tuple[Kind, str, Parts, bool]]:
    return {"row": (kind, about, parts, default)}


def _count(about: str) -> Any:
    return field(default=None, metadata=_row("count", about, "sum"))


def _moment(about: str, parts: Parts, *, default: bool = True) -> Any:
    return field(default=None, metadata=_row("moment", about, parts, default))


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What a record says of its tensor: facts, counts, moments, samples and sketch, in this order.

    To add one is to add a field here and its formula wherever one is computed; CONTRIBUTING.md says
    where that is. Counts but `n` exclude each other: no element is of two of these sorts.
    """

    shape: tuple[int, ...] = field(metadata=_row("fact", "of the tensor, or of this rank's part"))
    dtype: str = field(metadata=_row("fact", "`float32`, `bfloat16`, `bool`, ..."))
    n: int = field(metadata=_row("count", "elements", "sum"))
    nan: int | None = _count("NaN")
    pinf: int | None = _count("+infinity")
    ninf: int | None = _count("-infinity")
    zero: int | None = _count("zeros")
    min: float | None = _moment("the smallest", "smallest")
    max: float | None = _moment("the largest", "largest")
    sum: float | None = _moment("the sum", "sum", default=False)  # the mean and the counts say it
    mean: float | None = _moment("the mean", "mean")
    std: float | None = _moment("the standard deviation, of the population", "deviation")
    abs_mean: float | None = _moment("the mean of the magnitudes", "mean")
    l1: float | None = _moment("the sum of the magnitudes", "sum")
    l2: float | None = _moment("the root of the sum of the squares", "norm")
    samples: tuple[float | None, ...] | None = field(
        default=None,
        metadata=_row(
            "samples",
            f"the values at the flat indices `i * (n - 1) // {SAMPLED - 1}`, i from 0 to "
            f"{SAMPLED - 1}; null for NaN and infinity",
        ),
    )
    sketch: str | None = field(default=None, metadata=_row("sketch", "below, as text", "sum"))


SCHEMA = tuple(Row(one.name, *one.metadata["row"]) for one in fields(Statistics))

STATISTICS = tuple(row.name for row in SCHEMA)
"""What `same` stands for: the fields that an identical tensor has alike."""

DEFAULT_STATISTICS = tuple(row.name for row in SCHEMA if row.default)
"""What is recorded where nothing is asked for."""

COUNTS = tuple(row.name for row in SCHEMA if row.kind == "count")
SORTS = COUNTS[1:]
"""The counts of one sort of elements each."""

MOMENTS = tuple(row.name for row in SCHEMA if row.kind == "moment")

FIELDS = COUNTS + MOMENTS
"""The first numbers of a row, one for each name."""

_ENDS = dict(zip(STATISTICS, accumulate(row.width for row in SCHEMA), strict=True))
PLACES = {row.name: _ENDS[row.name] - row.width for row in SCHEMA if row.width}
"""Where in a row each statistic is, or begins."""

SAMPLES = slice(PLACES["samples"], _ENDS["samples"])
"""Where the samples are, not finite ones as they are."""

SKETCH = slice(PLACES["sketch"], _ENDS["sketch"])
"""Where the buckets of the sketch are."""

WIDTH = _ENDS[STATISTICS[-1]]
"""The numbers of a row."""

LAYOUT = (
    " ".join(f"{row.name}:{row.width}" for row in SCHEMA if row.width)
    + f" of {' '.join(ELEMENTS)}, {REMEMBERED} remembered"
)
"""Places and codes as text: what native code says that it was compiled with."""
