"""Attention by its definition in JAX, in float64 where ``jax_enable_x64`` is set, else float32.

    s = scale * (q . k);  s = cap * tanh(s / cap);  s = s + bias;  s = -inf where masked
    lse = log(sum_j exp(s_j) + sum_m exp(sink_m));  out = sum_j exp(s_j - lse) v_j

It materialises the (B, N, T, S) scores; products are of the highest precision of the device. A NaN
or an infinity reaches exactly the rows that attend to it, in outputs and in gradients.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyattn.jax.kit.layouts import from_bnth, grouped, joined, lse_from_bnt, to_bnth
from polyattn.jax.kit.masking import Dims, allowed, bias_scores
from polyattn.jax.kit.nonfinite import bad_rows, finite, spread_values

__all__ = ["defined_attention"]


def defined_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Any = None,
    bias: Any = None,
    sinks: Any = None,
    *,
    layout: str,
    scale: float,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_key: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Return out in the layout and lse (B, N, T), both in the widest type that JAX has here."""
    wide = jax.dtypes.canonicalize_dtype(jnp.float64)
    q, k, v = (to_bnth(x, layout).astype(wide) for x in (q, k, v))
    dims = Dims.of(q, k)
    seen = jnp.ones((1, 1, 1, 1), bool) if mask is None else allowed(mask, dims)
    seen = jnp.broadcast_to(seen, (dims.batch, dims.heads, dims.q_len, dims.kv_len))
    poisoned = bad_rows(q)[..., None] | joined(
        jnp.broadcast_to(
            bad_rows(k)[:, :, None, None, :],
            (dims.batch, dims.kv_heads, dims.heads // dims.kv_heads, 1, dims.kv_len),
        )
    )
    scores = _scores(finite(q), finite(k), seen, scale, softcap)
    if bias is not None:
        scores = scores + bias_scores(bias, dims, wide)
    scores = jnp.where(poisoned, jnp.nan, scores)
    weights, lse = _softmax(jnp.where(seen, scores, -jnp.inf), sinks)
    weights = jnp.where(seen, weights, 0)  # where all of a row is NaN, so are these
    if dropout_p > 0:
        kept = jax.random.bernoulli(dropout_key, 1 - dropout_p, weights.shape)
        weights = jnp.where(kept, weights / max(1 - dropout_p, 1e-30), 0)
    out = jnp.matmul(grouped(weights, dims.kv_heads), finite(v)[:, :, None], precision="highest")
    out = spread_values(joined(out), v, seen)
    return from_bnth(out, layout), lse_from_bnt(lse, layout)


def _scores(
    q: jax.Array, k: jax.Array, seen: jax.Array, scale: float, softcap: float | None
) -> jax.Array:
    heads = grouped(q, k.shape[1])
    scores = joined(jnp.matmul(heads, k[:, :, None].swapaxes(-1, -2), precision="highest")) * scale
    if softcap is None:
        return scores
    scores = jnp.where(seen, scores, 0)  # huge ones that nobody sees overflow
    return softcap * jnp.tanh(scores / softcap)


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return the weights and the lse; rows without keys have weights 0, lse -inf or the sinks'."""
    whole = scores
    if sinks is not None:
        logits = sinks.astype(scores.dtype).reshape(1, scores.shape[1], 1, -1)
        each = jnp.broadcast_to(logits, (*scores.shape[:3], logits.shape[-1]))
        whole = jnp.concatenate([scores, each], -1)
    peak = jax.lax.stop_gradient(whole.max(-1, keepdims=True))
    peak = jnp.where(peak == -jnp.inf, 0, peak)
    total = jnp.exp(whole - peak).sum(-1, keepdims=True)
    nothing = total == 0
    total = jnp.where(nothing, 1, total)
    lse = jnp.where(nothing, -jnp.inf, jnp.log(total) + peak)
    return jnp.exp(scores - peak) / total, lse[..., 0]
