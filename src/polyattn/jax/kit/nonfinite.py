"""Where NaN and infinities go: to the rows that attend to them, and to no other."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from polyattn.jax.kit.layouts import grouped, joined

__all__ = ["bad_rows", "finite", "spread_values"]


def finite(x: jax.Array) -> jax.Array:
    """Return `x` with 0 for what is not finite."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


def bad_rows(x: jax.Array) -> jax.Array:
    """Return which rows of (B, N, T, H) hold what is not finite: (B, N, T)."""
    return ~jnp.isfinite(x).all(-1)


def spread_values(out: jax.Array, v: jax.Array, allowed: jax.Array) -> jax.Array:
    """Let the non-finite values of `v` reach the rows of `out` that attend to them.

    `out` (B, N, T, V) was computed with zeros for them; `v` (B, K, S, V), `allowed` (B, N, T, S).
    """
    kinds = jnp.concatenate([jnp.isnan(v), v == jnp.inf, v == -jnp.inf], -1).astype(jnp.float32)
    seen = grouped(allowed, v.shape[1]).astype(jnp.float32) @ kinds[:, :, None]
    nan, high, low = jnp.split(joined(seen) > 0, 3, axis=-1)
    out = jnp.where(high, jnp.inf, out)
    out = jnp.where(low, -jnp.inf, out)
    return jnp.where(nan | (high & low), jnp.nan, out)
