"""The backward kernels: one sums over keys for dq, one over rows for dk and dv; nothing is atomic.

The second works on transposed tiles, so that no product has a transposed first operand, which
Mosaic lacks. Each query head gives gradients of its own keys; those of a group are added after.
Source: Dao et al., *FlashAttention-2* (arXiv 2307.08691).
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from polyattn.backends.pallas.lowering import dot
from polyattn.backends.pallas.operands import Operands, place_of, tiles_of
from polyattn.backends.pallas.tiles import LOG2E, Call, cleaned, scores, shown
from polyattn.backends.pallas.visits import Shown
from polyattn.jax.kit.varying import struct_like

__all__ = ["Incoming", "gradients_of_keys", "gradients_of_rows"]

Array: TypeAlias = jax.Array


class Incoming(NamedTuple):
    """What the passes before have left: dout (B, N, T, V); lse and delta (B, N, T) float32.

    `delta`: sum(dout * out) - dlse.
    """

    dout: Array
    lse: Array
    delta: Array


def gradients_of_rows(
    call: Call, q: Array, k: Array, v: Array, come: Incoming, mask: Shown | None
) -> tuple[Array, Array]:
    """Return dq (B, N, T, H) in the dtype of q, and the sums over keys of weights * dweights.

    Those are sum(dout * out), (B, N, T) float32, of an out that nobody rounded: what gradients of
    sinks want. Over whole blocks.
    """
    machine, size = call.machine, call.tiling.q
    batch, heads, rows, width = q.shape
    given = Operands(call)
    given.rows("q", q)
    given.rows("dout", come.dout)
    given.rows("lse", come.lse[..., None])
    given.rows("delta", come.delta[..., None])
    given.whole("k", k)
    given.whole("v", v)
    given.mask(mask, by_keys=False)
    spec = machine.spec((None, None, size, width), lambda b, n, i: (b, n, i, 0))
    column = machine.spec((None, None, size, 1), lambda b, n, i: (b, n, i, 0))
    dq, delta = machine.call(
        given.kernel(_rows_kernel, ("dq", "sums")),
        "polyattn_dq",
        call.tiling,
        grid=machine.grid(batch, heads, rows // size),
        in_specs=given.specs,
        out_specs=(spec, column),
        out_shape=(struct_like(q), struct_like(q, (batch, heads, rows, 1), jnp.float32)),
    )(*given.arrays)
    return dq, delta[..., 0]


def _rows_kernel(call: Call, ref: dict[str, Any]) -> None:
    place, size = place_of(call, ref), call.tiling.k
    q, dout, delta = ref["q"][...], ref["dout"][...], ref["delta"][...]
    level = _level(ref["lse"][...])

    def step(t: Any, sums: tuple[Array, ...], masked: bool) -> tuple[Array, ...]:
        j = place.tile(t)
        keys = pl.ds(pl.multiple_of(j * size, size), size)
        k, v = ref["k"][keys, :], ref["v"][keys, :]
        seen = None
        if masked:
            number = j * size + jax.lax.broadcasted_iota(jnp.int32, (q.shape[0], size), 1)
            ids = [(ref[f"q_ids{i}"][...], ref[f"k_ids{i}"][:, keys]) for i in range(call.ids)]
            seen = shown(number, ref["start"][...], ref["stop"][...], ids)
        found = scores(call, q, k, seen, transposed=False)
        weights = jnp.exp2(found.values - level)
        clean_k, clean_v = (cleaned(x) if call.careful else x for x in (k, v))
        dweights = dot(call.machine, dout, clean_v, (1, 1))
        products = weights * dweights
        if seen is not None:  # 0 times what overflowed, or is NaN
            products = jnp.where(seen, products, 0.0)
        whole = sums[1] + products.sum(1, keepdims=True)
        change = weights * (dweights - delta)
        change = _through(change, seen, found.slope)
        return sums[0] + dot(call.machine, change.astype(k.dtype), clean_k, (1, 0)), whole

    tiles = ref["k"].shape[0] // size
    begin = jnp.zeros(q.shape, jnp.float32), jnp.zeros((q.shape[0], 1), jnp.float32)
    dq, whole = tiles_of(call, place, tiles, step, begin)
    ref["dq"][...] = (dq * call.scale).astype(ref["dq"].dtype)
    ref["sums"][...] = whole


def gradients_of_keys(
    call: Call, q: Array, k: Array, v: Array, come: Incoming, mask: Shown | None
) -> tuple[Array, Array]:
    """Return dk (B, K, S, H) and dv (B, K, S, V) in their dtypes, over whole blocks."""
    machine, size = call.machine, call.tiling.k
    (batch, heads, _, width), columns, keys = q.shape, v.shape[-1], k.shape[2]
    given = Operands(call)
    given.rows("k", k, size)
    given.rows("v", v, size)
    given.whole("q", q)
    given.whole("dout", come.dout)
    given.whole("lse", come.lse[:, :, None, :])
    given.whole("delta", come.delta[:, :, None, :])
    given.mask(mask, by_keys=True)
    group = call.heads // call.kv_heads
    kept = [x.dtype if group == 1 else jnp.float32 for x in (k, v)]
    dk, dv = machine.call(
        given.kernel(_keys_kernel, ("dk", "dv")),
        "polyattn_dkv",
        call.tiling,
        grid=machine.grid(batch, heads, keys // size),
        in_specs=given.specs,
        out_specs=tuple(
            machine.spec((None, None, size, last), lambda b, n, i: (b, n, i, 0))
            for last in (width, columns)
        ),
        out_shape=tuple(
            struct_like(q, (batch, heads, keys, last), dtype)
            for last, dtype in zip((width, columns), kept, strict=True)
        ),
    )(*given.arrays)
    if group == 1:
        return dk, dv
    dk, dv = (x.reshape(batch, call.kv_heads, group, keys, -1).sum(2) for x in (dk, dv))
    return dk.astype(k.dtype), dv.astype(v.dtype)


def _keys_kernel(call: Call, ref: dict[str, Any]) -> None:
    place, size = place_of(call, ref), call.tiling.q
    k, v = ref["k"][...], ref["v"][...]
    clean_v = cleaned(v) if call.careful else v
    number = place.i * call.tiling.k + jax.lax.broadcasted_iota(jnp.int32, (k.shape[0], size), 0)

    def step(t: Any, sums: tuple[Array, ...], masked: bool) -> tuple[Array, ...]:
        dk, dv = sums
        i = place.tile(t)
        rows = pl.ds(pl.multiple_of(i * size, size), size)
        q, dout = ref["q"][rows, :], ref["dout"][rows, :]
        seen = None
        if masked:
            ids = [(ref[f"q_ids{n}"][:, rows], ref[f"k_ids{n}"][...]) for n in range(call.ids)]
            seen = shown(number, ref["start"][:, rows], ref["stop"][:, rows], ids)
        found = scores(call, q, k, seen, transposed=True)
        weights = jnp.exp2(found.values - _level(ref["lse"][:, rows]))
        change = weights * (dot(call.machine, clean_v, dout, (1, 1)) - ref["delta"][:, rows])
        change = _through(change, seen, found.slope)
        clean_q = cleaned(q) if call.careful else q
        dv = dv + dot(call.machine, weights.astype(dout.dtype), dout, (1, 0))
        dk = dk + dot(call.machine, change.astype(q.dtype), clean_q, (1, 0))
        return dk, dv

    sums = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dk, dv = tiles_of(call, place, ref["q"].shape[0] // size, step, sums)
    ref["dk"][...] = (dk * call.scale).astype(ref["dk"].dtype)
    ref["dv"][...] = dv.astype(ref["dv"].dtype)


def _level(lse: Array) -> Array:
    """Return the lse to the base 2; rows that see nothing have weights of 0 with any."""
    return jnp.where(lse == -jnp.inf, 0.0, lse * LOG2E)


def _through(change: Array, seen: Array | None, slope: Array | None) -> Array:
    """Return the gradient of the products from that of the scores."""
    if slope is not None:
        change = change * slope
    if seen is not None:  # 0 times what overflowed, or is NaN
        change = jnp.where(seen, change, 0.0)
    return change
