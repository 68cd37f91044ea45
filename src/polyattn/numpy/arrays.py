"""From NumPy arrays to what the extension takes: pointers, memory, and strides in entries.

Whoever asks for a pointer keeps its array alive until the call has ended.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DTYPES", "Array", "Described", "Strides", "bias_argument", "described", "memory", "readable",
    "rows", "slopes_argument", "strides", "with_dense_rows",
]  # fmt: skip

Array: TypeAlias = NDArray[Any]
Strides: TypeAlias = tuple[int, ...]
Described: TypeAlias = tuple[int, int, int, int, int]

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}  # by name: bfloat16 is another package's


def readable(x: Array) -> Array:
    """Return `x` as the kernels read it: native byte order, strides that count whole entries."""
    size = x.dtype.itemsize
    if not (x.dtype.isnative and x.flags.aligned) or any(s < 0 or s % size for s in x.strides):
        return np.array(x, dtype=x.dtype.newbyteorder("="), order="C", subok=False)
    return np.asarray(x)


def with_dense_rows(x: Array) -> Array:
    """Return `x` readable and with a contiguous last dim."""
    x = readable(x)
    return x if x.shape[-1] == 1 or x.strides[-1] == x.dtype.itemsize else np.ascontiguousarray(x)


def memory(x: Array) -> tuple[int, int]:
    """Return the address of the first entry, and the bytes from there to the end of the last one.

    Of a readable array, whose strides never point back.
    """
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)) + x.dtype.itemsize
    return int(x.__array_interface__["data"][0]), reach if x.size else 0


def strides(x: Array) -> Strides:
    """Return the strides in entries; 0 for dims of size 1, whose strides NumPy leaves open."""
    size = x.dtype.itemsize
    return tuple(s // size if n > 1 else 0 for n, s in zip(x.shape, x.strides, strict=True))


def described(x: Array, layout: str) -> Described:
    """Return pointer, bytes and the strides of batch, heads and rows of an array in the layout."""
    if layout == "packed":
        row, head, _ = strides(x)
        return *memory(x), 0, head, row
    first, second, third, _ = strides(x)
    return (*memory(x), first, *((third, second) if layout == "BTNH" else (second, third)))


def rows(x: Array) -> Described:
    """Return pointer, bytes and strides of a float32 a query: (B, N, T), (N, total) packed."""
    batch, head, row = (0, *strides(x))[-3:]
    return *memory(x), batch, head, row


def bias_argument(bias: Array) -> tuple[int, int, int, int, int, int, int]:
    """Return pointer, bytes, dtype and strides of four dims; 0 where the bias broadcasts."""
    batch, head, row, column = (0,) * (4 - bias.ndim) + strides(bias)
    return *memory(bias), DTYPES[bias.dtype.name], batch, head, row, column


def slopes_argument(slopes: Array) -> tuple[int, int, int, int]:
    """Return pointer, bytes, batch and head strides of float32 slopes (N,), (1, N) or (B, N)."""
    batch, head = (0, *strides(slopes))[-2:]
    return *memory(slopes), batch, head
