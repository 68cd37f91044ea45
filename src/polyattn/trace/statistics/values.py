"""An array's values as a row of real numbers: what sketch, statistics and fingerprints go over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyattn.errors import TraceError
from polyattn.trace.statistics.schema import LARGEST

__all__ = ["CHUNK", "LARGEST", "as_array", "chunks", "dtype_name", "row"]

CHUNK = 1 << 16
"""Elements converted to float64 at a time: they stay in the processor's cache."""


def as_array(array: Any) -> NDArray[Any]:
    """Return `array` as a NumPy array of numbers; raise TraceError if it holds anything else.

    Numbers: bool, integers, floats, complex, and the types of ml_dtypes (bfloat16, float8, ...).
    """
    try:
        found = np.asarray(array)
    except Exception as error:  # whatever a foreign array says when it will not become NumPy's
        raise TraceError(
            f"got a {type(array).__name__} that NumPy cannot take ({error}), expected an array of "
            "numbers on the CPU; convert it first."
        ) from error
    kind, foreign = found.dtype.kind, found.dtype.type is np.void
    if kind not in "biufcV" or foreign:
        raise TraceError(
            f"got an array of dtype {found.dtype}, expected numbers: bool, int, float or complex."
        )
    return found


def dtype_name(array: NDArray[Any]) -> str:
    """Return the name that all frameworks use for the dtype: ``float32``, ``bfloat16``, ``bool``.

    >>> dtype_name(np.zeros(1, ">f4"))
    'float32'
    """
    return str(array.dtype.name)


def row(array: NDArray[Any]) -> NDArray[Any]:
    """Return the values in C order as one dimension; complex numbers as real, imaginary, ...

    A view where the array allows one.
    """
    flat = array.reshape(-1)
    if flat.dtype.kind != "c":
        return flat
    if not flat.dtype.isnative or not flat.flags.c_contiguous:
        flat = np.ascontiguousarray(flat, flat.dtype.newbyteorder("="))
    return flat.view(flat.real.dtype)


def chunks(values: NDArray[Any], size: int = CHUNK) -> Iterator[NDArray[np.float64]]:
    """Yield copies of the row `values` in float64, at most `size` at a time, not finite ones too.

    Numbers of a wider type than float64 that pass its range become infinite. To be walked with
    NumPy's floating-point errors ignored: the program may have made them exceptions.
    """
    for start in range(0, values.size, size):
        yield values[start : start + size].astype(np.float64)
