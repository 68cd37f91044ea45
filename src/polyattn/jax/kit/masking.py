"""Masks and biases as JAX arrays: whole, or for some rows and columns of the scores.

Shapes: a dense mask broadcasts to (B, N, T, S), True = attend.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyattn.errors import InvalidProblem
from polyattn.masks import BlockMap, Dense, Index, Mask, Packed
from polyattn.masks.biases import Alibi, Bias

__all__ = [
    "Dims", "allowed", "bias_scores", "bind_mask", "coordinates", "expand_blocks", "known",
    "narrowed", "signed",
]  # fmt: skip


class Dims(NamedTuple):
    """The sizes of one call."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array) -> Dims:
        """Take the sizes of (B, N, T, H) arrays."""
        return cls(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])


def bind_mask(mask: Mask) -> Mask:
    """Return `mask` with its arrays as JAX arrays: booleans, int32, or int64 that JAX has already.

    int64 of other libraries becomes int32, which all entries fit.
    """

    def turn(name: str, payload: Any) -> Any:
        if payload is None or (isinstance(payload, jax.Array) and name == "mask"):
            return payload
        if isinstance(payload, jax.Array):
            return signed(payload, wrap=name in ("q_ids", "kv_ids"))
        try:
            array = np.asarray(payload)
        except Exception as error:  # each library raises its own: on a device, quantised, ...
            raise InvalidProblem(
                f"got a mask whose {name} JAX cannot read ({type(payload).__name__}: {error}), "
                "expected a JAX or NumPy array or a list; copy it to the CPU."
            ) from error
        if name == "mask":
            return jnp.asarray(array, dtype=bool)
        limits = np.iinfo(np.int32)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise InvalidProblem(
                f"got a mask whose {name} holds numbers from {array.min()} to {array.max()}, "
                f"expected numbers of 32 bits: JAX has no others unless jax_enable_x64 is set."
            )
        return jnp.asarray(array, dtype=jnp.int32)

    return mask.map(turn)


def signed(x: jax.Array, wrap: bool = False) -> jax.Array:
    """Return integers as int32, or int64 if they have 64 bits: what every kernel reads.

    Unsigned ones that do not fit become the largest that there is, for they are compared with
    positions; with `wrap` they keep their bits, so that ids stay apart from each other.
    """
    kept = jnp.dtype(jnp.int64 if x.dtype.itemsize == 8 else jnp.int32)
    if x.dtype == kept:
        return x
    if not wrap and x.dtype in (jnp.uint32, jnp.uint64):
        x = jnp.minimum(x, np.array(np.iinfo(kept).max, x.dtype))
    return x.astype(kept)


def known(payload: Any) -> Any:
    """Return the payload for NumPy to read where that waits for no device, else None."""
    if isinstance(payload, jax.core.Tracer):
        return None
    if isinstance(payload, jax.Array):
        here = payload.is_fully_addressable and all(d.platform == "cpu" for d in payload.devices())
        return np.asarray(payload) if here else None
    return np.asarray(payload)


def allowed(
    mask: Mask, dims: Dims, rows: jax.Array | None = None, columns: jax.Array | None = None
) -> jax.Array:
    """Return which keys are attended, (B|1, N|1, R|1, C|1) bool.

    `rows`, `columns`: the queries and keys that are asked about, counted in the array's rows; all
    of them if None. One past the end gives anything.
    """
    rows = jnp.arange(dims.q_len) if rows is None else rows
    columns = jnp.arange(dims.kv_len) if columns is None else columns
    return _dense(mask, dims, _grid(mask, dims, rows, columns), rows, columns)


def coordinates(mask: Mask, dims: Dims) -> Index:
    """Return coordinates that broadcast to (B, N, T, S) for :meth:`Mask.allows`."""
    return _grid(mask, dims, jnp.arange(dims.q_len), jnp.arange(dims.kv_len))


def _dense(mask: Mask, dims: Dims, index: Index, rows: jax.Array, columns: jax.Array) -> jax.Array:
    if mask.parts:
        return mask.combined([_dense(part, dims, index, rows, columns) for part in mask.parts])
    if isinstance(mask, Dense):
        return _part(_four_dims(mask.mask), rows, columns)
    return _four_dims(jnp.asarray(expand_blocks(mask, dims.kv_len).allows(index)))


def _part(x: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Take rows and columns of what broadcasts to (B, N, T, S)."""
    for axis, wanted in ((2, rows), (3, columns)):
        if x.shape[axis] > 1:
            x = jnp.take(x, wanted, axis=axis, mode="clip")
    return x


def _grid(mask: Mask, dims: Dims, rows: jax.Array, columns: jax.Array) -> Index:
    """Return coordinates that broadcast to (B, N, R, C) for :meth:`Mask.allows`."""
    t, j = rows.reshape(1, 1, -1, 1), columns.reshape(1, 1, 1, -1)
    n = jnp.arange(dims.heads).reshape(1, -1, 1, 1)
    align = mask.align or "bottom_right"
    packed = next((leaf for leaf in mask.leaves() if isinstance(leaf, Packed)), None)
    if packed is None:
        b = jnp.arange(dims.batch).reshape(-1, 1, 1, 1)
        return Index(b, n, t, j, dims.q_len, dims.kv_len, align)
    cu_q, cu_kv = packed.cu_q, packed.cu_kv
    last = cu_q.shape[0] - 2
    seq_q = jnp.clip(jnp.searchsorted(cu_q, t, side="right") - 1, 0, max(last, 0))
    seq_k = jnp.clip(jnp.searchsorted(cu_kv, j, side="right") - 1, 0, max(last, 0))
    return Index(
        seq_q, n, t - cu_q[seq_q], j - cu_kv[seq_k], jnp.diff(cu_q)[seq_q],
        jnp.diff(cu_kv)[seq_q], align, seq_q == seq_k, t, j,
    )  # fmt: skip


def _four_dims(x: jax.Array) -> jax.Array:
    return x if x.ndim == 4 else x.reshape((1,) * (4 - x.ndim) + x.shape)


def expand_blocks(mask: Mask, kv_len: int) -> Mask:
    """Return `mask` with every BlockMap given its bit map, so that it can be asked anywhere."""
    if mask.parts:
        return mask.of_parts(tuple(expand_blocks(part, kv_len) for part in mask.parts))
    if isinstance(mask, BlockMap) and mask.bits is None:
        bits = _block_bits(mask, kv_len)
        return BlockMap(mask.block_q, mask.block_k, mask.indices, mask.counts, bits)
    return mask


def _block_bits(mask: BlockMap, kv_len: int) -> jax.Array:
    """Return which blocks of keys each block of queries visits: (B, N, nQ, nK) bool."""
    blocks = -(-kv_len // mask.block_k)
    listed = jnp.arange(mask.indices.shape[-1]) < mask.counts[..., None]
    target = jnp.where(listed, mask.indices, blocks)
    return (target[..., None] == jnp.arange(blocks)).any(-2)


def narrowed(bias: jax.Array, dtype: Any) -> jax.Array:
    """Return a bias in `dtype`, with no number made infinite: that would hide its key."""
    most = jnp.finfo(dtype).max
    if not jnp.issubdtype(bias.dtype, jnp.floating) or jnp.finfo(bias.dtype).max <= most:
        return bias.astype(dtype)
    return jnp.where(jnp.isinf(bias), bias, jnp.clip(bias, -most, most)).astype(dtype)


def bias_scores(
    bias: Bias,
    dims: Dims,
    dtype: Any,
    rows: jax.Array | None = None,
    columns: jax.Array | None = None,
) -> jax.Array:
    """Return what a bias adds to the scores, in `dtype`, (B|1, N|1, R|1, C|1)."""
    rows = jnp.arange(dims.q_len) if rows is None else rows
    columns = jnp.arange(dims.kv_len) if columns is None else columns
    array = bias.payload
    if not isinstance(bias, Alibi):
        return narrowed(_part(_four_dims(array), rows, columns), dtype)
    distance = jnp.abs(rows[:, None] + dims.kv_len - dims.q_len - columns)
    slopes = array.astype(dtype).reshape(-1 if array.ndim == 2 else 1, dims.heads, 1, 1)
    return -slopes * distance.astype(dtype)
