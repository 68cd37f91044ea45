"""The statistics of a record, computed with NumPy: the reference for every other framework.

All are over the finite elements, in float64; null where there are none. Numbers that would pass
the range of float64 (an l1 of huge values) are its largest number, so a record is always JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyattn.errors import TraceError
from polyattn.trace.statistics import sketch as sketches
from polyattn.trace.statistics.schema import DEFAULT_STATISTICS, MOMENTS, SAMPLED
from polyattn.trace.statistics.values import CHUNK, LARGEST, as_array, chunks, dtype_name, row

__all__ = ["sample_index", "statistics"]

_SAFE = 400
"""Squares of numbers from 2**-400 to 2**400, and sums of them, stay within float64."""


@np.errstate(all="ignore")
def statistics(
    array: ArrayLike,
    *,
    global_shape: Sequence[int] | None = None,
    start: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the fields of a record that describe an array by default, ready for JSON.

    `global_shape` and `start`: where the array is one box of a larger tensor, that tensor's shape
    and the box's first index in each dimension. They place the sketch, and are in the result;
    everything else is of the box alone. Complex numbers are two elements, real and imaginary, in
    all of them, also in `n`. Raises TraceError for what is no array of numbers, or not in there.

    >>> found = statistics(np.array([3.0, -4.0, np.nan, 0.0], np.float32))
    >>> {name: found[name] for name in ("n", "nan", "zero", "min", "max", "abs_mean", "l1", "l2")}
    {'n': 4, 'nan': 1, 'zero': 1, 'min': -4.0, 'max': 3.0, 'abs_mean': 2.3333333333333335,
     'l1': 7.0, 'l2': 5.0}
    """
    found = as_array(array)
    shape = [int(size) for size in found.shape]
    result: dict[str, Any] = {"shape": shape, "dtype": dtype_name(found)}
    index = None
    if global_shape is not None:
        whole, first = _box(shape, global_shape, start)
        result |= {"global_shape": whole, "start": first}
        slices = [slice(a, a + n) for a, n in zip(first, shape, strict=True)]
        index = sketches.flat_index(whole, slices)
    values = row(found)
    counts, extremes = _counts(values)
    numbers = counts | _moments(values, counts, extremes)
    numbers["samples"] = [_sample(values[i]) for i in sample_index(values.size)]
    numbers["sketch"] = sketches.encode(sketches.sketch(found, index=index))
    return result | {name: numbers[name] for name in DEFAULT_STATISTICS if name not in result}


def sample_index(n: int) -> list[int]:
    """Return the flat indices of the samples: ``i * (n - 1) // 7`` for i from 0 to 7.

    >>> sample_index(71), sample_index(2), sample_index(0)
    ([0, 10, 20, 30, 40, 50, 60, 70], [0, 0, 0, 0, 0, 0, 0, 1], [])
    """
    return [i * (n - 1) // (SAMPLED - 1) for i in range(SAMPLED)] if n else []


def _box(
    shape: list[int], global_shape: Sequence[int], start: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    whole = [int(size) for size in global_shape]
    first = [0] * len(whole) if start is None else [int(place) for place in start]
    fits = len(shape) == len(whole) == len(first) and all(
        a >= 0 and a + n <= size for a, n, size in zip(first, shape, whole, strict=True)
    )
    if not fits:
        raise TraceError(
            f"got an array of shape {shape} that starts at {first} of a tensor of shape {whole}, "
            "expected a box within it, with as many dimensions."
        )
    return whole, first


def _blocks(values: NDArray[Any]) -> Iterator[NDArray[np.float64]]:
    """The finite values in float64, a block at a time."""
    for chunk in chunks(values, 16 * CHUNK):
        finite = np.isfinite(chunk)
        yield chunk if finite.all() else chunk[finite]


def _counts(values: NDArray[Any]) -> tuple[dict[str, Any], tuple[float, float]]:
    """The counts, and the smallest and the largest finite element."""
    nan = pinf = ninf = zero = 0
    low, high = math.inf, -math.inf
    for chunk in chunks(values, 16 * CHUNK):
        finite = np.isfinite(chunk)
        if not finite.all():
            nan += int(np.isnan(chunk).sum())
            pinf += int((chunk == math.inf).sum())
            ninf += int((chunk == -math.inf).sum())
            chunk = chunk[finite]
        if chunk.size:
            zero += int(chunk.size - np.count_nonzero(chunk))
            low, high = min(low, float(chunk.min())), max(high, float(chunk.max()))
    counts = {"n": int(values.size), "nan": nan, "pinf": pinf, "ninf": ninf, "zero": zero}
    return counts, (low, high)


def _moments(
    values: NDArray[Any], counts: dict[str, Any], extremes: tuple[float, float]
) -> dict[str, Any]:
    """Mean and the like, in two passes over values that are scaled where squares need it."""
    finite = counts["n"] - counts["nan"] - counts["pinf"] - counts["ninf"]
    if not finite:
        return dict.fromkeys(MOMENTS)
    low, high = extremes
    exponent = math.frexp(max(abs(low), abs(high)))[1]
    scale = -exponent if abs(exponent) > _SAFE else 0
    total = absolute = square = spread = 0.0
    for block in _scaled(values, scale):
        total += float(block.sum())
        absolute += float(np.abs(block).sum())
        square += float(np.dot(block, block))
    mean = total / finite
    for block in _scaled(values, scale):
        block -= mean
        spread += float(np.dot(block, block))
    scaled = {
        "sum": total, "mean": mean, "std": math.sqrt(spread / finite),
        "abs_mean": absolute / finite, "l1": absolute, "l2": math.sqrt(square),
    }  # fmt: skip
    found = {name: _unscaled(value, scale) for name, value in scaled.items()}
    return found | {"min": low, "max": high}


def _scaled(values: NDArray[Any], scale: int) -> Iterator[NDArray[np.float64]]:
    for block in _blocks(values):
        yield np.ldexp(block, scale) if scale else block


def _unscaled(value: float, scale: int) -> float:
    return float(np.clip(np.ldexp(value, -scale), -LARGEST, LARGEST))


def _sample(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
