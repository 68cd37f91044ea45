"""Fingerprints of weights: which parameter of one model is which of another, whatever its name.

Sum, sum of squares, sum of cubes, smallest and largest value in float64 are the same for the
transposed weight, so they find it; the sketch, which sees order, says whether the layout is the
same. The moments of equal slices along each dimension find the parts of a fused weight.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyattn.errors import TraceError
from polyattn.trace.statistics import sketch as sketches
from polyattn.trace.statistics.values import as_array, dtype_name, row

__all__ = [
    "Moments", "TOLERANCE", "assemble", "block_counts", "fingerprint", "marginals", "matches",
    "moments", "same_layout", "slices",
]  # fmt: skip

TOLERANCE = 1e-9
_COUNTS = (12, 10, 9, 8, 7, 5)
"""Numbers of blocks: their divisors and joins are all fusions up to 10 parts. q, k and v of
grouped-query attention are g + 2 of them, for g query heads to a key head."""

_STACK = 256
"""Dimensions up to this size of tensors with 3 or more are kept whole: heads, experts."""


class Moments(NamedTuple):
    """What the same values in any order share. ``a + b`` is of both together.

    >>> Moments(1, 2.0, 4.0, 8.0, 2.0, 2.0) + Moments(1, 3.0, 9.0, 27.0, 3.0, 3.0)
    Moments(n=2, sum=5.0, sum2=13.0, sum3=35.0, min=2.0, max=3.0)
    """

    n: int
    sum: float
    sum2: float
    sum3: float
    min: float
    max: float

    def __add__(self, other: Moments) -> Moments:  # type: ignore[override]
        return Moments(
            self.n + other.n,
            self.sum + other.sum,
            self.sum2 + other.sum2,
            self.sum3 + other.sum3,
            min(self.min, other.min),
            max(self.max, other.max),
        )


def fingerprint(array: ArrayLike) -> dict[str, Any]:
    """Return an array's fingerprint as plain data, for the header of a trace.

    NaN and infinities count as 0 in it. Complex numbers have a last dimension of 2. Raises
    TraceError for what is no array of numbers.

    >>> w = np.arange(12.0).reshape(4, 3)
    >>> a, b = fingerprint(w), fingerprint(w.T)
    >>> matches(moments(a), moments(b)), same_layout(a, b)
    (True, False)
    >>> matches(slices(a, 0, 2)[1], moments(fingerprint(w[2:])))
    True
    """
    found = as_array(array)
    values = found
    if found.dtype.kind == "c":
        values = row(found).reshape(*found.shape, 2)
    return assemble(
        found.shape, dtype_name(found), marginals(values), sketches.encode(sketches.sketch(found))
    )


def marginals(array: NDArray[Any]) -> list[NDArray[np.float64]]:
    """Return for each dimension a (5, size) array: sum, of squares, of cubes, min and max.

    Each is over all other dimensions, in float64, for one index of the dimension. Other frameworks
    compute these where the weight is and call :func:`assemble`. A 0-dimensional array counts as one
    of one element.
    """
    array = np.atleast_1d(array)
    found = [np.zeros((5, size)) for size in array.shape]
    for of in found:
        of[3], of[4] = np.inf, -np.inf
    with np.errstate(all="ignore"):
        for start, block in _blocks(array):
            block = np.where(np.isfinite(block), block, 0.0)
            for dim, of in enumerate(found):
                others = tuple(d for d in range(block.ndim) if d != dim)
                at = slice(start, start + len(block)) if dim == 0 else slice(None)
                square = block * block
                of[0, at] += block.sum(axis=others)
                of[1, at] += square.sum(axis=others)
                of[2, at] += (square * block).sum(axis=others)
                of[3, at] = np.minimum(of[3, at], block.min(axis=others, initial=np.inf))
                of[4, at] = np.maximum(of[4, at], block.max(axis=others, initial=-np.inf))
    return found


def _blocks(array: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.float64]]]:
    rows = max(1, (1 << 18) // max(1, math.prod(array.shape[1:])))
    for start in range(0, len(array), rows):
        yield start, array[start : start + rows].astype(np.float64)


def assemble(
    shape: Sequence[int], dtype: str, along: Sequence[NDArray[np.float64]], sketch: str
) -> dict[str, Any]:
    """Return the fingerprint from its parts: :func:`marginals`, and the sketch as text."""
    found: dict[str, Any] = {"shape": [int(size) for size in shape], "dtype": dtype}
    whole = _join(along[0])
    n = math.prod(one.shape[1] for one in along)
    values = dict(zip(Moments._fields[1:], map(float, whole), strict=True))
    found |= {"n": n, **values} if n else {"n": 0, **dict.fromkeys(values, 0.0)}
    found["sketch"] = sketch
    found["slices"] = {
        str(dim): {
            str(count): base64.b64encode(_blocked(one, count).astype("<f8").tobytes()).decode()
            for count in block_counts(one.shape[1], len(shape))
        }
        for dim, one in enumerate(along)
        if n
    }
    return found


def block_counts(size: int, dimensions: int) -> list[int]:
    """Return into how many equal blocks a dimension of `size` is divided in a fingerprint.

    >>> block_counts(2304, 2), block_counts(64, 3), block_counts(17, 2)
    ([12, 9, 8], [64], [])
    """
    if dimensions > 2 and 1 < size <= _STACK:
        return [size]
    counts = [count for count in _COUNTS if size % count == 0]
    few = [count for count in (6, 4, 3, 2) if size % count == 0]
    return counts + [c for c in few if all(count % c for count in [*counts, *few] if count > c)]


def _join(along: NDArray[np.float64]) -> NDArray[np.float64]:
    return _blocked(along, 1)[:, 0] if along.shape[1] else np.zeros(5)


def _blocked(along: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    parts = along.reshape(5, count, -1)
    with np.errstate(all="ignore"):
        joined = [*parts[:3].sum(axis=2), parts[3].min(axis=1), parts[4].max(axis=1)]
        found: NDArray[np.float64] = np.nan_to_num(np.stack(joined))
    return found


def moments(of: Mapping[str, Any]) -> Moments:
    """Return the moments of a whole fingerprint; TraceError if it is none."""
    try:
        found = Moments(of["n"], *(float(of[name]) for name in Moments._fields[1:]))
        if type(found.n) is int and found.n >= 0 and all(map(math.isfinite, found)):
            return found
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    raise TraceError(f"got {of!r:.120}, expected a fingerprint of a weight.")


def slices(of: Mapping[str, Any], dim: int, count: int) -> list[Moments] | None:
    """Return the moments of `count` equal slices along a dimension, or None where it has not them.

    >>> [part.sum for part in slices(fingerprint(np.arange(12.0)), 0, 3)]
    [6.0, 22.0, 38.0]
    """
    stored = of.get("slices", {})
    try:
        for blocks, text in stored.get(str(dim), {}).items():
            if int(blocks) % count == 0 and int(blocks) > 0:
                values = np.frombuffer(base64.b64decode(text, validate=True), "<f8")
                if values.size != 5 * int(blocks) or not np.isfinite(values).all():
                    raise ValueError(f"{values.size} numbers for {blocks} blocks")
                joined = _blocked(values.reshape(5, -1), count)
                n = moments(of).n // count
                return [Moments(n, *map(float, one)) for one in joined.T]
    except (ValueError, TypeError, AttributeError) as error:
        raise TraceError(
            f"got a fingerprint with slices that are none ({error}), expected them as polyattn "
            "writes them."
        ) from error
    return None


def matches(a: Moments, b: Moments, tolerance: float = TOLERANCE) -> bool:
    """Return whether two weights have the same values in some order, as far as moments say.

    Sums of many terms that cancel are held to the tolerance of their terms, not of the rest.
    """
    if a.n != b.n:
        return False
    largest = max(abs(a.min), abs(a.max), abs(b.min), abs(b.max))
    square = max(a.sum2, b.sum2)
    scales = (math.sqrt(a.n) * math.sqrt(square), square, square * largest, largest, largest)
    return all(
        abs(one - other) <= tolerance * scale
        for one, other, scale in zip(a[1:], b[1:], scales, strict=True)
    )


def same_layout(a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float = 1e-6) -> bool:
    """Return whether two weights with the same values have them in the same places and shape."""
    alike = list(a.get("shape", ())) == list(b.get("shape", ()))
    return alike and sketches.distance(str(a["sketch"]), str(b["sketch"])) <= tolerance
