"""The forward pass: one soft-max over blocks of keys, whose maximum and sum are carried along.

Source: Rabe and Staats, *Self-attention Does Not Need O(n^2) Memory* (arXiv 2112.05682); Dao et
al., *FlashAttention* (arXiv 2205.14135).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyattn.backends.blockwise.derivatives import over_all_tiles
from polyattn.backends.blockwise.score_tiles import (
    Array,
    Blocks,
    Extras,
    Tile,
    block_range,
    part,
    tile,
)  # fmt: skip
from polyattn.jax.kit.nonfinite import finite
from polyattn.jax.kit.varying import as_varying

__all__ = ["Sums", "add", "attend", "finish", "nothing"]


class Sums(NamedTuple):
    """What is carried over the keys of a block of queries; (B, K, G, R) and (B, K, G, R, V).

    `nan`, `high`, `low`: where values that are not finite were attended to.
    """

    peak: Array
    total: Array
    out: Array
    nan: Array
    high: Array
    low: Array


@over_all_tiles
def attend(blocks: Blocks, extras: Extras, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Return out (B, K, G, T, V) and lse (B, K, G, T), padded, in the wide type."""

    def of_block(i: Array) -> tuple[Array, Array]:
        return _query_block(blocks, extras, part(q, i, blocks.q, 3), k, v, i)

    out, lse = jax.lax.map(of_block, jnp.arange(blocks.of_q))
    return _together(out), _together(lse)


def _together(x: Array) -> Array:
    """Return (blocks, B, K, G, R, ...) as (B, K, G, T, ...)."""
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], x.shape[3] * x.shape[4], *x.shape[5:])


def _query_block(
    blocks: Blocks, extras: Extras, q: Array, k: Array, v: Array, i: Array
) -> tuple[Array, Array]:
    def step(j: Array, sums: Sums) -> Sums:
        found = tile(blocks, extras, q, part(k, j, blocks.k, 2), i, j)
        return add(sums, found, part(v, j, blocks.k, 2))

    sums = nothing(q, v.shape[-1])
    sums = jax.lax.fori_loop(*block_range(blocks, extras.mask, i), step, sums)
    return finish(sums, extras.sinks)


def nothing(q: Array, columns: int) -> Sums:
    """Return the sums over no keys, of queries (B, K, G, R, H) and values of so many columns."""
    wide, rows = jnp.promote_types(q.dtype, jnp.float32), q.shape[:4]
    clear = jnp.zeros((*rows, columns), bool)
    sums = Sums(
        jnp.full(rows, -jnp.inf, wide), jnp.zeros(rows, wide),
        jnp.zeros((*rows, columns), wide), clear, clear, clear,
    )  # fmt: skip
    return as_varying(sums, q)


def add(sums: Sums, found: Tile, values: Array) -> Sums:
    """Add a tile of scores, whose values are (B, K, C, V)."""
    peak = jnp.maximum(sums.peak, found.scores.max(-1))
    level = jnp.where(peak == -jnp.inf, 0, peak)
    shrink = jnp.where(sums.peak == -jnp.inf, 0, jnp.exp(sums.peak - level))
    weights = jnp.where(found.seen, jnp.exp(found.scores - level[..., None]), 0)
    added = jnp.einsum(
        "bkgts,bksv->bkgtv", weights, finite(values).astype(peak.dtype), precision="highest"
    )
    out = sums.out * shrink[..., None] + added
    total = sums.total * shrink + weights.sum(-1)
    return _mark(Sums(peak, total, out, *sums[3:]), found.seen, values)


def _mark(sums: Sums, seen: Array, values: Array) -> Sums:
    """Note where values that are not finite are attended to, which is rare."""

    def mark(sums: Sums) -> Sums:
        kinds = jnp.stack([jnp.isnan(values), values == jnp.inf, values == -jnp.inf])
        met = jnp.einsum("bkgts,xbksv->xbkgtv", _full(seen, sums), kinds.astype(jnp.float32)) > 0
        return sums._replace(nan=sums.nan | met[0], high=sums.high | met[1], low=sums.low | met[2])

    seen = as_varying(seen, sums.peak)  # JAX, which maps a condition, would say it a second time
    marked: Sums = jax.lax.cond(jnp.isfinite(values).all(), lambda sums: sums, mark, sums)
    return marked


def _full(seen: Array, sums: Sums) -> Array:
    shape = (*sums.peak.shape, seen.shape[-1])
    return jnp.broadcast_to(seen, shape).astype(jnp.float32)


def finish(sums: Sums, sinks: Any) -> tuple[Array, Array]:
    """Divide by the sum, that of the sinks included; rows without keys are 0."""
    peak, total, wide = sums.peak, sums.total, sums.peak.dtype
    level, shrink = jnp.where(peak == -jnp.inf, 0, peak), jnp.ones((), wide)
    if sinks is not None:
        logits = sinks.astype(wide).reshape(1, *peak.shape[1:3], 1, -1)
        level = jnp.maximum(peak, logits.max(-1))
        level = jnp.where(level == -jnp.inf, 0, level)
        shrink = jnp.where(peak == -jnp.inf, 0, jnp.exp(peak - level))
        total = total * shrink + jnp.exp(logits - level[..., None]).sum(-1)
    nothing = total == 0
    whole = jnp.where(nothing, 1, total)
    out = sums.out * (shrink / whole)[..., None]
    out = jnp.where(sums.high, jnp.inf, out)
    out = jnp.where(sums.low, -jnp.inf, out)
    out = jnp.where(sums.nan | (sums.high & sums.low), jnp.nan, out)
    return out, jnp.where(nothing, -jnp.inf, jnp.log(whole) + level)
