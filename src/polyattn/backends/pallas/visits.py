"""Which tiles a kernel visits: for each block of rows its blocks of keys, and the other way round.

Tiles of which every entry is seen come first, and are computed without a mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from polyattn.jax.kit.seen_ranges import Ranges
from polyattn.masks import BlockMap

__all__ = ["Lists", "Shown", "lists_of", "padded_to"]

Array: TypeAlias = jax.Array


class Lists(NamedTuple):
    """The tiles of each block: (B|1, N|1, blocks, others) int32, of which so many are meant.

    `full`: how many of the first are seen wholly; `any`: how many are visited; (B|1, N|1, blocks).
    """

    tiles: Array
    full: Array
    any: Array


class Shown(NamedTuple):
    """What the kernel is given of a mask, for whole blocks; see :class:`Ranges` for the rest."""

    start: Array
    stop: Array
    ids: tuple[tuple[Array, Array], ...]
    lists: Lists


def lists_of(ranges: Ranges, block_q: int, block_k: int, kv_len: int, *, by_keys: bool) -> Shown:
    """Return what the kernel takes: with `by_keys` the lists of each block of keys."""
    full, visited = _tiles(ranges, block_q, block_k, kv_len)
    if by_keys:
        full, visited = jnp.swapaxes(full, 2, 3), jnp.swapaxes(visited, 2, 3)
    order = jnp.argsort(jnp.where(full, 0, jnp.where(visited, 1, 2)), axis=-1, stable=True)
    lists = Lists(
        order.astype(jnp.int32), full.sum(-1, dtype=jnp.int32), visited.sum(-1, dtype=jnp.int32)
    )
    start, stop = (padded_to(x, block_q, 1) for x in (ranges.start, ranges.stop))
    ids = tuple((padded_to(q, block_q, 1), padded_to(k, block_k, 1)) for q, k in ranges.ids)
    return Shown(start, stop, ids, lists)


def padded_to(x: Array, block: int, axis: int, mode: str = "constant") -> Array:
    """Fill an axis up to whole blocks: with zeros, or by `mode` of ``jnp.pad``."""
    lacking = -x.shape[axis] % block
    pads = [(0, lacking if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, pads, mode=mode) if lacking else x


def _tiles(ranges: Ranges, block_q: int, block_k: int, kv_len: int) -> tuple[Array, Array]:
    """Return which tiles are seen wholly and which at all, (B|1, N|1, nQ, nK) bool."""
    begins = jnp.arange(-(-kv_len // block_k)) * block_k
    ends = begins + block_k
    nothing = ranges.start >= ranges.stop
    last = jnp.iinfo(jnp.int32).max
    least = _blocks(jnp.where(nothing, last, ranges.start), block_q).min(-1)[..., None]
    most = _blocks(jnp.where(nothing, 0, ranges.stop), block_q).max(-1)[..., None]
    visited = (least < ends) & (most > begins)
    highest = _blocks(ranges.start, block_q).max(-1)[..., None]
    lowest = _blocks(jnp.where(nothing, 0, ranges.stop), block_q).min(-1)[..., None]
    full = (highest <= begins) & (lowest >= ends)
    for q_ids, kv_ids in ranges.ids:
        q, k = _blocks(q_ids, block_q), _blocks(kv_ids, block_k)
        q_low, q_high = q.min(-1)[..., None], q.max(-1)[..., None]
        k_low, k_high = k.min(-1)[:, None], k.max(-1)[:, None]
        visited = visited & (q_low <= k_high) & (k_low <= q_high)
        full = full & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    full, visited = full[:, None], visited[:, None]
    for one in ranges.maps:
        bits = _refined(one, block_q, block_k, visited.shape[2:])
        full, visited = full & bits, visited & bits
    return full & visited, visited


def _blocks(x: Array, block: int) -> Array:
    """Return (B, T) as (B, blocks, block); what fills up the last one repeats its last entry."""
    whole = padded_to(x, block, 1, "edge")
    return whole.reshape(x.shape[0], -1, block)


def _refined(one: BlockMap, block_q: int, block_k: int, shape: tuple[int, ...]) -> Any:
    """Return the bits of a map for tiles that divide its blocks."""
    bits = jnp.asarray(one.bits, bool)
    bits = jnp.repeat(bits, one.block_q // block_q, 2)[:, :, : shape[0]]
    return jnp.repeat(bits, one.block_k // block_k, 3)[..., : shape[1]]
