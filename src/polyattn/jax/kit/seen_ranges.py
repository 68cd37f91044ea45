"""A mask as kernels take it: a range of keys for each row, ids, and blocks that are not visited.

Causal, Window, Chunked, FirstKeys, PrefixLM, Padding, LeftPadding and Packed each show a row one
range of keys, so that joined by ``&`` they are one range too: two integers a row, computed here in
plain JAX. Segments stay ids that are compared. A BlockMap is nothing but tiles that are not
visited. Kernels never learn of masks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from polyattn.jax.kit.masking import Dims, expand_blocks
from polyattn.masks import (
    And,
    BlockMap,
    Chunked,
    FirstKeys,
    Full,
    LeftPadding,
    Mask,
    Packed,
    Padding,
    PrefixLM,
    Segments,
)

__all__ = ["Ranges", "block_maps", "ranges_of"]

Array: TypeAlias = jax.Array


class Ranges(NamedTuple):
    """Row t of entry b sees the keys `start` <= j < `stop` of its own id in each pair of `ids`.

    `start`, `stop`: (B|1, T) int32, the same number in rows that see nothing. `ids`: pairs of
    (B|1, T) and (B|1, S). `maps`: bit maps (B|1, N|1, nQ, nK) with the sizes of their blocks.
    """

    start: Array
    stop: Array
    ids: tuple[tuple[Array, Array], ...]
    maps: tuple[BlockMap, ...]


class _Tokens(NamedTuple):
    """Where each token stands: (1, T) and (1, S), or one row of all sequences when packed.

    `entry`: of batch, to look lengths up, or None for all of them. `row`, `column`: the place in
    the sequence. `begin`, `end`: the sequence's keys. `shift`: from a row to its own key.
    """

    entry: Any
    row: Array
    begin: Any
    end: Any
    shift: Any
    key_entry: Any
    column: Array


def ranges_of(mask: Mask | None, dims: Dims) -> Ranges:
    """Return the ranges of a mask that joins ranges, ids and block maps by ``&``."""
    parts = () if mask is None else mask.parts if isinstance(mask, And) else (mask,)
    at = _tokens(parts, dims, "bottom_right" if mask is None else mask.align or "bottom_right")
    start, stop = jnp.broadcast_to(at.begin, at.row.shape), jnp.broadcast_to(at.end, at.row.shape)
    ids, maps = [], []
    for part in parts:
        if isinstance(part, Segments):
            ids.append(_ids(part, at, dims))
        elif isinstance(part, BlockMap):
            maps.append(expand_blocks(part, dims.kv_len))
        else:
            low, high = _range(part, at)
            start = start if low is None else jnp.maximum(start, low)
            stop = stop if high is None else jnp.minimum(stop, high)
    stop = jnp.maximum(start, stop)
    return Ranges(start.astype(jnp.int32), stop.astype(jnp.int32), tuple(ids), tuple(maps))  # type: ignore[arg-type]


def block_maps(mask: Mask | None) -> tuple[BlockMap, ...]:
    """Return the block maps in a mask."""
    leaves = () if mask is None else mask.leaves()
    return tuple(leaf for leaf in leaves if isinstance(leaf, BlockMap))


def _tokens(parts: tuple[Mask, ...], dims: Dims, align: str) -> _Tokens:
    rows, columns = jnp.arange(dims.q_len)[None], jnp.arange(dims.kv_len)[None]
    packed = next((part for part in parts if isinstance(part, Packed)), None)
    if packed is None:
        shift = 0 if align == "top_left" else dims.kv_len - dims.q_len
        return _Tokens(None, rows, 0, dims.kv_len, shift, None, columns)
    cu_q, cu_kv = jnp.asarray(packed.cu_q), jnp.asarray(packed.cu_kv)
    last = max(cu_q.shape[0] - 2, 0)
    of_q, of_k = (
        jnp.clip(jnp.searchsorted(cu, x[0], side="right") - 1, 0, last)
        for cu, x in ((cu_q, rows), (cu_kv, columns))
    )
    begin, end = cu_kv[of_q], cu_kv[of_q + 1]
    lengths = cu_q[of_q + 1] - cu_q[of_q]
    shift = begin if align == "top_left" else end - lengths
    row, column = rows - cu_q[of_q], columns - cu_kv[of_k]
    return _Tokens(of_q, row, begin, end, shift, of_k, column)


def _range(part: Mask, at: _Tokens) -> tuple[Any, Any]:
    """Return the first key and the end of those that a leaf shows each row; None: no bound."""
    if isinstance(part, (Full, Packed)):
        return None, None
    if isinstance(part, Padding):
        end = None
        if part.kv_lengths is not None:
            end = at.begin + _of_entry(part.kv_lengths, at.entry)
        if part.q_lengths is not None:
            shown = at.row < _of_entry(part.q_lengths, at.entry)
            end = jnp.where(shown, at.end if end is None else end, 0)
        return None, end
    if isinstance(part, LeftPadding):
        begin = None
        if part.kv_starts is not None:
            begin = at.begin + _of_entry(part.kv_starts, at.entry)
        if part.q_starts is None:
            return begin, None
        return begin, jnp.where(at.row >= _of_entry(part.q_starts, at.entry), at.end, 0)
    if isinstance(part, FirstKeys):
        return None, at.begin + min(part.count, at.column.shape[-1])
    own = at.row + at.shift
    if isinstance(part, Chunked):
        size = min(part.size, at.row.shape[-1] + at.column.shape[-1])  # beyond which all are one
        begin = at.begin + (own - at.begin) // size * size
        return begin, begin + size
    if isinstance(part, PrefixLM):
        return None, jnp.maximum(own + 1, at.begin + _of_entry(part.lengths, at.entry))
    low, high = part.band or (None, None)
    return None if low is None else own + low, None if high is None else own + high + 1


def _of_entry(lengths: Any, entry: Any) -> Array:
    """Return (B,) lengths as (B, 1), or as one for each token of a packed row."""
    lengths = jnp.asarray(lengths)
    return lengths[:, None] if entry is None else lengths[entry][None]


def _ids(part: Segments, at: _Tokens, dims: Dims) -> tuple[Array, Array]:
    """Return the ids of rows and keys, (B|1, T) and (B|1, S)."""
    found = []
    for ids, entry, place in (
        (part.q_ids, at.entry, at.row), (part.kv_ids, at.key_entry, at.column),
    ):  # fmt: skip
        ids = jnp.asarray(ids, jnp.int32)
        if entry is not None and ids.ndim == 2:  # told by sequence and place
            ids = ids[entry * (ids.shape[0] > 1), place[0]]
        found.append(ids if ids.ndim == 2 else ids[None])
    return found[0], found[1]
