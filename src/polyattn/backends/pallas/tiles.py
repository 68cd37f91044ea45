"""What a kernel does with a tile: scores to the base 2, masks, soft caps, the way of NaN.

A tile is (rows, keys), or transposed (keys, rows) in the pass that sums over rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from polyattn.backends.pallas.lowering import Machine, Tiling, dot

__all__ = ["LOG2E", "Call", "Scores", "cleaned", "scores", "shown"]

Array: TypeAlias = jax.Array
LOG2E = math.log2(math.e)


class Call(NamedTuple):
    """What a call is beside its arrays; hashable.

    `masked`: whether rows see ranges of keys, with so many pairs of `ids`. `careful`: whether
    something is not finite, and has to reach the rows that see it and no other.
    """

    machine: Machine
    heads: int
    kv_heads: int
    scale: float
    softcap: float | None
    tiling: Tiling
    masked: bool
    ids: int
    careful: bool = False


class Scores(NamedTuple):
    """Scores to the base 2, and the derivative of the soft cap."""

    values: Array
    slope: Array | None


def shown(keys: Array, start: Array, stop: Array, ids: Any) -> Array:
    """Return which entries of a tile are seen; arguments broadcast against each other."""
    seen = (keys >= start) & (keys < stop)
    for q_ids, kv_ids in ids:
        seen = seen & (q_ids == kv_ids)
    return seen


def scores(call: Call, rows: Array, keys: Array, seen: Array | None, transposed: bool) -> Scores:
    """Compute a tile from rows (R, H) and keys (C, H); what is not seen is -inf."""
    first, second = (keys, rows) if transposed else (rows, keys)
    if call.careful:
        bad = _bad(first), _bad(second).reshape(1, -1)
        first, second = cleaned(first), cleaned(second)
    values = dot(call.machine, first, second, (1, 1)) * call.scale
    slope = None
    if call.softcap is not None:
        if seen is not None:
            values = jnp.where(seen, values, 0.0)
        share = jnp.tanh(values / call.softcap)
        values, slope = share * call.softcap, 1 - share * share
    values = values * LOG2E
    if call.careful:
        values = jnp.where(bad[0] | bad[1], jnp.nan, values)
    if seen is not None:
        values = jnp.where(seen, values, -jnp.inf)
    return Scores(values, slope)


def cleaned(x: Array) -> Array:
    """Return `x` with 0 for what is not finite."""
    wide = x.astype(jnp.float32)  # which alone Mosaic can ask
    return jnp.where(jnp.isfinite(wide), wide, 0.0).astype(x.dtype)


def _bad(x: Array) -> Array:
    """Return which rows hold what is not finite, (R, 1)."""
    finite = jnp.isfinite(x.astype(jnp.float32))
    return jnp.where(finite, 0.0, 1.0).max(1, keepdims=True) > 0
