"""What rows see of keys, asked block by block of rows: memory O(S), however long the rows are.

For kernels of others, which give rows without keys the mean of all values, and let NaN through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from polyattn.jax.kit.layouts import grouped, joined
from polyattn.jax.kit.masking import Dims, allowed
from polyattn.jax.kit.nonfinite import bad_rows, spread_values
from polyattn.jax.kit.seen_ranges import ranges_of
from polyattn.masks import Mask

__all__ = ["is_tame", "put_back", "rows_that_see", "without_unseen"]

Array: TypeAlias = jax.Array
_MOST_ENTRIES = 1 << 24  # scores at once, of all heads
_TAME = 2.0**40


def rows_that_see(mask: Mask, dims: Dims) -> Array:
    """Return which rows see a key, (B|1, T) bool, of a mask of ranges and ids."""
    ranges = ranges_of(mask, dims)
    if not ranges.ids:
        return ranges.start < ranges.stop
    keys = jnp.arange(dims.kv_len)

    def of_rows(rows: Array) -> Array:
        start, stop = (jnp.take(x, rows, 1, mode="clip") for x in (ranges.start, ranges.stop))
        seen = (keys >= start[..., None]) & (keys < stop[..., None])
        for q_ids, kv_ids in ranges.ids:
            seen = seen & (jnp.take(q_ids, rows, 1, mode="clip")[..., None] == kv_ids[:, None])
        return seen.any(-1)

    return _by_blocks(of_rows, dims.q_len, dims.batch * dims.kv_len)


def is_tame(*arrays: Array) -> Array:
    """Whether no product of two entries can overflow: all are finite and none is huge."""
    return functools.reduce(jnp.logical_and, [(jnp.abs(x) < _TAME).all() for x in arrays])


def without_unseen(q: Array, k: Array, v: Array, mask: Mask | None) -> tuple[Array, Array, Array]:
    """Return q, k and v (B, N, rows, H) with 0 in rows that see nothing or that nobody sees.

    What stands there is often nobody's; kernels of others let it overflow in their gradients.
    """
    if mask is None:
        return q, k, v
    dims = Dims.of(q, k)

    def of_rows(rows: Array) -> Array:
        seen = allowed(mask, dims, jnp.minimum(rows, dims.q_len - 1)).any(1)
        return jnp.broadcast_to(seen.any(-2)[:, None], (dims.batch, 1, dims.kv_len))

    # as many rows at a time as for scores: one answer for each block of them
    size = max(1, min(dims.q_len, _MOST_ENTRIES // max(dims.batch * dims.heads * dims.kv_len, 1)))
    blocks = jnp.arange(-(-dims.q_len // size) * size).reshape(-1, size)
    keys = jax.lax.map(of_rows, blocks).any(0)[:, 0]
    rows = rows_that_see(mask, dims)
    at = keys[:, None, :, None]
    return jnp.where(rows[:, None, :, None], q, 0), jnp.where(at, k, 0), jnp.where(at, v, 0)


def put_back(
    out: Array, lse: Array | None, q: Array, k: Array, v: Array, mask: Mask | None
) -> tuple[Array, Array | None]:
    """Let what is not finite in q, k and v reach the rows of `out` that see it.

    `out` (B, N, T, V) and `lse` (B, N, T) were computed with zeros for it.
    """
    dims = Dims.of(q, k)

    def of_rows(rows: Array) -> Array:
        seen = jnp.ones((1, 1, 1, 1), bool) if mask is None else allowed(mask, dims, rows)
        seen = jnp.broadcast_to(seen, (dims.batch, dims.heads, rows.shape[0], dims.kv_len))
        q_rows, out_rows = (jnp.take(x, rows, 2, mode="clip") for x in (q, out))
        bad = joined(grouped(seen, dims.kv_heads) & bad_rows(k)[:, :, None, None])
        poisoned = bad.any(-1) | (bad_rows(q_rows) & seen.any(-1))
        found = jnp.where(poisoned[..., None], jnp.nan, spread_values(out_rows, v, seen))
        marks = jnp.broadcast_to(poisoned[..., None], (*poisoned.shape, 1)).astype(found.dtype)
        return jnp.moveaxis(jnp.concatenate([found, marks], -1), 2, 1)

    found = jnp.moveaxis(
        _by_blocks(of_rows, dims.q_len, dims.batch * dims.heads * dims.kv_len), 1, 2
    )
    out, poisoned = found[..., :-1].astype(out.dtype), found[..., -1] > 0
    return out, None if lse is None else jnp.where(poisoned, jnp.nan, lse)


def _by_blocks(of_rows: Callable[[Array], Any], rows: int, entries: int) -> Array:
    """Return (B, rows, ...) from what `of_rows` gives for some rows, as (B, some, ...)."""
    size = max(1, min(rows, _MOST_ENTRIES // max(entries, 1)))
    blocks = jnp.arange(-(-rows // size) * size).reshape(-1, size)
    found = jnp.moveaxis(jax.lax.map(of_rows, blocks), 0, 1)
    return found.reshape(found.shape[0], -1, *found.shape[3:])[:, :rows]
