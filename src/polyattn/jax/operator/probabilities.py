"""The attention probabilities themselves, for who wants to look at them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyattn.jax.kit.layouts import grouped, joined
from polyattn.jax.kit.masking import Dims, allowed, bias_scores, bind_mask

__all__ = ["attention_weights"]


def attention_weights(
    q: jax.Array, k: jax.Array, lse: jax.Array, *, mask: Any, bias: Any, scale: float, softcap: Any
) -> jax.Array:
    """Return exp(score - lse), (B, N, T, S) float32, 0 where masked; q and k are (B, N, T, H).

    It materialises what the backends do not: T x S numbers for each head.
    """
    dims, wide = Dims.of(q, k), jnp.promote_types(q.dtype, jnp.float32)
    heads = grouped(q.astype(wide), dims.kv_heads)
    scores = joined(jnp.matmul(heads, k.astype(wide)[:, :, None].swapaxes(-1, -2))) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias_scores(bias, dims, wide)
    seen = jnp.ones((1, 1, 1, 1), bool) if mask is None else allowed(bind_mask(mask), dims)
    level = jnp.where(lse == -jnp.inf, 0, lse)[..., None]
    return jnp.where(seen, jnp.exp(scores - level), 0)
