"""From the vector that the device sends to the fields of a record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from polyattn.errors import TraceError
from polyattn.trace.recorders.jax.device_statistics import FLOATS, WORDS
from polyattn.trace.recorders.jax.host_statistics import WORDS as HOST_WORDS
from polyattn.trace.statistics import sketch as sketches
from polyattn.trace.statistics.definition import statistics
from polyattn.trace.statistics.schema import (
    COUNTS,
    DEFAULT_STATISTICS,
    FIELDS,
    MOMENTS,
    SAMPLES,
    SKETCH,
    SORTS,
)
from polyattn.trace.statistics.sketch_text import pack
from polyattn.trace.statistics.values import LARGEST

__all__ = ["fields_of"]


def fields_of(shape: tuple[int, ...], dtype: Any, vector: np.ndarray) -> Mapping[str, Any]:
    """Return the statistics of a tensor as :func:`polyattn.trace.statistics.statistics` does."""
    size = math.prod(shape)
    if not size:
        return statistics(np.zeros(shape, dtype))
    vector = np.asarray(vector, np.int32)
    if vector.size == HOST_WORDS:
        return _of_row(shape, dtype, vector.view(np.float64))
    sorts = dict(zip(SORTS, vector[: WORDS - 1].view(np.uint32).tolist(), strict=True))
    n = size * (2 if np.dtype(dtype).kind == "c" else 1)
    wide = vector.size - WORDS > 2 * sum(count for _, count in FLOATS)
    numbers = _numbers(vector[WORDS:].view(np.float64 if wide else np.float32))
    found = {"shape": list(shape), "dtype": np.dtype(dtype).name, "n": n, **sorts}
    finite = n - sorts["nan"] - sorts["pinf"] - sorts["ninf"]
    found |= _moments(numbers, finite, int(vector[WORDS - 1]))
    found["samples"] = [float(v) if math.isfinite(v) else None for v in numbers["samples"]]
    buckets = _times_power(numbers["sketch"], int(vector[WORDS - 1]))
    found["sketch"] = sketches.encode(buckets)
    return {name: found[name] for name in DEFAULT_STATISTICS}


def _of_row(shape: tuple[int, ...], dtype: Any, row: np.ndarray) -> Mapping[str, Any]:
    """The fields from the native kernel's numbers: counts, moments, samples, sketch."""
    counts, moments = row[: len(COUNTS)].tolist(), row[len(COUNTS) : len(FIELDS)].tolist()
    if counts[0] != counts[0]:
        raise TraceError("the native kernel could not read a tensor; see the log.")
    found: dict[str, Any] = {"shape": list(shape), "dtype": np.dtype(dtype).name}
    found |= zip(COUNTS, map(int, counts), strict=True)
    found |= {
        name: value if value == value else None
        for name, value in zip(MOMENTS, moments, strict=True)
    }
    found["samples"] = [v if math.isfinite(v) else None for v in row[SAMPLES].tolist()]
    found["sketch"] = pack(row[SKETCH].tolist())
    return {name: found[name] for name in DEFAULT_STATISTICS}


def _numbers(floats: np.ndarray) -> dict[str, np.ndarray]:
    found, at = {}, 0
    for name, count in FLOATS:
        pair = floats[at : at + 2 * count].astype(np.float64).reshape(2, count)
        found[name], at = pair[0] + pair[1], at + 2 * count
    return found


def _moments(
    numbers: Mapping[str, np.ndarray], finite: int, exponent: int
) -> dict[str, float | None]:
    if not finite:
        return dict.fromkeys(MOMENTS)
    total, absolute = float(numbers["sum"][0]), float(numbers["absolute"][0])
    shift, spread = float(numbers["shift"][0]), float(numbers["spread"][0])
    mean = total / finite
    variance = max(spread / finite - (mean - shift) ** 2, 0.0)
    square = spread + 2 * shift * (total - finite * shift) + finite * shift * shift
    scaled = {
        "sum": total, "mean": mean, "std": math.sqrt(variance), "abs_mean": absolute / finite,
        "l1": absolute, "l2": math.sqrt(max(square, 0.0)),
    }  # fmt: skip
    found: dict[str, float | None]
    found = {name: float(_times_power(value, exponent)) for name, value in scaled.items()}
    return found | {name: float(numbers[name][0]) for name in ("min", "max")}


@np.errstate(over="ignore")
def _times_power(values: Any, exponent: int) -> np.ndarray:
    return np.clip(np.ldexp(values, exponent), -LARGEST, LARGEST)
