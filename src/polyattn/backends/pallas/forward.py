"""The forward kernel: one soft-max over the visited tiles of a block of rows.

Source: Dao et al., *FlashAttention-2* (arXiv 2307.08691).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from polyattn.backends.pallas.lowering import dot
from polyattn.backends.pallas.operands import Operands, place_of, tiles_of
from polyattn.backends.pallas.tiles import LOG2E, Call, cleaned, scores, shown
from polyattn.backends.pallas.visits import Shown
from polyattn.jax.kit.varying import struct_like

__all__ = ["attend"]

Array: TypeAlias = jax.Array


def attend(
    call: Call, q: Array, k: Array, v: Array, sinks: Any, mask: Shown | None
) -> tuple[Array, Array]:
    """Return out (B, N, T, V) in the dtype of q and lse (B, N, T) float32, over whole blocks.

    q (B, N, T, H), k (B, K, S, H), v (B, K, S, V); `sinks`: (N,) float32, one for each head.
    """
    machine, size = call.machine, call.tiling.q
    batch, heads, rows, _ = q.shape
    given = Operands(call)
    given.rows("q", q)
    given.whole("k", k)
    given.whole("v", v)
    given.mask(mask, by_keys=False)
    given.scalars("sinks", sinks)
    out = machine.spec((None, None, size, v.shape[-1]), lambda b, n, i: (b, n, i, 0))
    lse = machine.spec((None, None, size, 1), lambda b, n, i: (b, n, i, 0))
    found = machine.call(
        given.kernel(_kernel, ("out", "lse")),
        "polyattn_forward",
        call.tiling,
        grid=machine.grid(batch, heads, rows // size),
        in_specs=given.specs,
        out_specs=(out, lse),
        out_shape=(
            struct_like(q, (batch, heads, rows, v.shape[-1])),
            struct_like(q, (batch, heads, rows, 1), jnp.float32),
        ),
    )(*given.arrays)
    return found[0], found[1][..., 0]


def _kernel(call: Call, ref: dict[str, Any]) -> None:
    place = place_of(call, ref)
    q, wide = ref["q"][...], jnp.float32
    size, columns = q.shape[0], ref["v"].shape[-1]

    def step(t: Any, sums: tuple[Array, ...], masked: bool) -> tuple[Array, ...]:
        peak, total, out, *marks = sums
        j = place.tile(t)
        keys = pl.ds(pl.multiple_of(j * call.tiling.k, call.tiling.k), call.tiling.k)
        k, v = ref["k"][keys, :], ref["v"][keys, :]
        seen = None
        if masked:
            number = j * call.tiling.k + jax.lax.broadcasted_iota(
                jnp.int32, (size, call.tiling.k), 1
            )
            ids = [(ref[f"q_ids{i}"][...], ref[f"k_ids{i}"][:, keys]) for i in range(call.ids)]
            seen = shown(number, ref["start"][...], ref["stop"][...], ids)
        found = scores(call, q, k, seen, transposed=False).values
        new = jnp.maximum(peak, found.max(1, keepdims=True))
        level = jnp.where(new == -jnp.inf, 0.0, new)
        shrink = jnp.exp2(peak - level)
        weights = jnp.exp2(found - level)
        total = total * shrink + weights.sum(1, keepdims=True)
        clean = cleaned(v) if call.careful else v
        out = out * shrink + dot(call.machine, weights.astype(v.dtype), clean, (1, 0))
        if call.careful:
            marks = _marked(call, marks, seen, v, size)
        return new, total, out, *marks

    sums = (
        jnp.full((size, 1), -jnp.inf, wide), jnp.zeros((size, 1), wide),
        jnp.zeros((size, columns), wide),
    )  # fmt: skip
    if call.careful:
        sums = (*sums, *(jnp.zeros((size, columns), wide) for _ in range(3)))
    sums = tiles_of(call, place, ref["k"].shape[0] // call.tiling.k, step, sums)
    out, lse = _finished(sums, ref["sinks"][place.n] * LOG2E if "sinks" in ref else None)
    ref["out"][...] = out.astype(ref["out"].dtype)
    ref["lse"][...] = lse


def _marked(call: Call, marks: Any, seen: Array | None, v: Array, size: int) -> Any:
    """Count where values that are NaN, infinite, or so below zero are seen."""
    wide = jnp.float32
    met = jnp.ones((size, v.shape[0]), wide) if seen is None else seen.astype(wide)
    v = v.astype(wide)
    kinds = v != v, v == jnp.inf, v == -jnp.inf
    return [
        mark + dot(call.machine, met, kind.astype(wide), (1, 0))
        for mark, kind in zip(marks, kinds, strict=True)
    ]


def _finished(sums: tuple[Array, ...], sink: Any) -> tuple[Array, Array]:
    """Divide by the sum, that of the sink included; rows that see nothing are 0, lse -inf."""
    peak, total, out, *marks = sums
    level = jnp.where(peak == -jnp.inf, 0.0, peak)
    if sink is not None:
        new = jnp.maximum(peak, sink)
        new = jnp.where(new == -jnp.inf, 0.0, new)
        shrink = jnp.exp2(level - new)
        total, out, level = total * shrink + jnp.exp2(sink - new), out * shrink, new
    nothing = total == 0
    whole = jnp.where(nothing, 1.0, total)
    out = out / whole
    if marks:
        nan, high, low = (mark > 0 for mark in marks)
        out = jnp.where(high, jnp.inf, out)
        out = jnp.where(low, -jnp.inf, out)
        out = jnp.where(nan | (high & low), jnp.nan, out)
    return out, jnp.where(nothing, -jnp.inf, (level + jnp.log2(whole)) / LOG2E)
