"""A tensor's statistics and sketch, computed where it is: one small vector leaves the device.

No float64 and no uint64 are needed. Values are scaled by a power of two, so that neither sums nor
squares overflow; sums of 16 values are in float32, and those of the sums in two floats, which
together have about 48 bits. With `jax_enable_x64` the same runs in float64.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from polyattn.trace.recorders.jax.sign_words import sign_words
from polyattn.trace.statistics.definition import sample_index
from polyattn.trace.statistics.schema import BUCKETS, SAMPLED, SORTS

__all__ = ["FLOATS", "WORDS", "supported", "vector"]

_LANES, _BLOCK = BUCKETS, 16
WORDS = len(SORTS) + 1
"""Integers before the floats of the vector: a count for each sort of elements, and the exponent."""
FLOATS = (("min", 1), ("max", 1), ("shift", 1), ("sum", 1), ("absolute", 1), ("spread", 1),
          ("samples", SAMPLED), ("sketch", _LANES))  # fmt: skip
"""What follows, and how many numbers each is; each number is two floats that are added."""

_Two = tuple[Array, Array]


def supported(dtype: Any) -> bool:
    """Whether arrays of this dtype hold numbers: keys of random generators, for one, do not."""
    return dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.number)


@jax.jit
def vector(x: Array) -> Array:
    """Return everything about `x` that a record says, as one vector of int32."""
    flat = _real_row(x)
    high, low = _split(flat)
    finite = jnp.isfinite(high)
    counts = {
        "nan": jnp.isnan(high).sum(dtype=jnp.uint32),
        "pinf": (high == jnp.inf).sum(dtype=jnp.uint32),
        "ninf": (high == -jnp.inf).sum(dtype=jnp.uint32),
        "zero": _zeros(flat, high),
    }
    least, most = _extremes(flat, high, finite)
    exponent = _exponent(least, most)
    scale = _power(-exponent, high.dtype)
    parts = [jnp.where(finite, part, 0) * scale for part in (high, low) if part is not None]
    total = _add(*(_sum(part) for part in parts))
    shift = total[0] / jnp.maximum(finite.sum(dtype=jnp.uint32), 1).astype(high.dtype)
    sizes = (
        [jnp.abs(parts[0])]
        if low is None
        else [jnp.sign(flat).astype(high.dtype) * part for part in parts]
    )
    apart = parts[0] - shift if low is None else (parts[0] - shift) + parts[1]
    words = sign_words(-(-flat.size // _LANES))
    index = jnp.asarray(sample_index(flat.size), jnp.uint32)
    found = {
        "min": least, "max": most, "shift": (shift, jnp.zeros_like(shift)), "sum": total,
        "absolute": _add(*(_sum(size) for size in sizes)),
        "spread": _sum(jnp.where(finite, apart * apart, 0)), "samples": _split(flat[index]),
        "sketch": _add(*(_sketch(part, words) for part in parts)),
    }  # fmt: skip
    floats = [_filled(found[name], size) for name, size in FLOATS]
    bits = lax.bitcast_convert_type(jnp.concatenate(floats), jnp.int32).reshape(-1)
    sorts = jnp.stack([counts[name] for name in SORTS])
    whole = lax.bitcast_convert_type(sorts, jnp.int32)
    return jnp.concatenate([whole, exponent.reshape(1), bits])


def _real_row(x: Array) -> Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    return x.reshape(-1)


def _split(values: Array) -> tuple[Array, Array | None]:
    """Values as floats; integers that no float32 holds as the sum of two."""
    if jax.config.jax_enable_x64:
        return values.astype(jnp.float64), None
    if values.dtype in (jnp.int32, jnp.uint32):
        low = values & 0xFFFF
        return (values - low).astype(jnp.float32), low.astype(jnp.float32)
    return values.astype(jnp.float32), None


def _filled(pair: tuple[Array, Array | None], size: int) -> Array:
    high, low = pair
    both = jnp.stack([high, jnp.zeros_like(high) if low is None else low])
    return both.reshape(2, size).reshape(-1)


def _zeros(flat: Array, high: Array) -> Array:
    """How many are 0. By their bits: compilers let subnormal numbers equal 0."""
    if not jnp.issubdtype(flat.dtype, jnp.floating):
        return (flat == 0).sum(dtype=jnp.uint32)
    bits = lax.bitcast_convert_type(high, jnp.uint64 if high.dtype == jnp.float64 else jnp.uint32)
    return ((bits << 1) == 0).sum(dtype=jnp.uint32)


def _extremes(flat: Array, high: Array, finite: Array) -> tuple[Any, Any]:
    if jnp.issubdtype(flat.dtype, jnp.integer):
        return _split(flat.min()), _split(flat.max())
    least = jnp.where(finite, high, jnp.inf).min()
    most = jnp.where(finite, high, -jnp.inf).max()
    return (least, None), (most, None)


def _exponent(least: tuple[Array, Any], most: tuple[Array, Any]) -> Array:
    """The power of two next above the values; kept where it and its inverse are normal numbers."""
    largest = jnp.maximum(jnp.abs(least[0]), jnp.abs(most[0]))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    limit = 1022 if largest.dtype == jnp.float64 else 126
    return jnp.clip(jnp.frexp(largest)[1].astype(jnp.int32), -limit, limit)


def _power(exponent: Array, dtype: Any) -> Array:
    """``2**exponent``, exactly."""
    if dtype == jnp.float64:
        bits = (exponent.astype(jnp.int64) + 1023) << 52
        return lax.bitcast_convert_type(bits, jnp.float64)
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _two_sum(a: Any, b: Any) -> Any:
    """Add two pairs; what the first number of the sum rounds off goes to the second."""
    total = a[0] + b[0]
    seen = total - a[0]
    return total, a[1] + b[1] + ((a[0] - (total - seen)) + (b[0] - seen))


def _add(*pairs: _Two) -> _Two:
    return pairs[0] if len(pairs) == 1 else _two_sum(*pairs)


def _reduced(sums: Array, dims: tuple[int, ...]) -> _Two:
    zero = jnp.zeros((), sums.dtype)
    return lax.reduce((sums, jnp.zeros_like(sums)), (zero, zero), _two_sum, dims)


def _sum(values: Array) -> _Two:
    return _reduced(_rows(values).sum(axis=1), (0, 1))


def _rows(values: Array) -> Array:
    """The row as blocks of 16 rows of 64, with zeros at the end."""
    padded = jnp.pad(values, (0, -values.size % (_BLOCK * _LANES)))
    return padded.reshape(-1, _BLOCK, _LANES)


def _sketch(values: Array, words: _Two) -> _Two:
    rows = _rows(values).reshape(-1, _LANES)
    column = jnp.arange(_LANES, dtype=jnp.uint32)
    low, high = (jnp.pad(word, (0, len(rows) - word.size))[:, None] for word in words)
    bit = jnp.where(column < 32, low >> (column & 31), high >> (column & 31)) & 1
    signed = jnp.where(bit == 1, -rows, rows)
    return _reduced(signed.reshape(-1, _BLOCK, _LANES).sum(axis=1), (0,))
