"""From the call's layout to (B, N, T, H) and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["from_bnth", "grouped", "joined", "lse_from_bnt", "to_bnth"]


def to_bnth(x: jax.Array, layout: str) -> jax.Array:
    """Return an array of the call as (B, N, T, H); packed rows become one batch entry."""
    if layout == "BNTH":
        return x
    return jnp.swapaxes(x if layout == "BTNH" else x[None], 1, 2)


def from_bnth(x: jax.Array, layout: str) -> jax.Array:
    """Undo :func:`to_bnth`."""
    if layout == "BNTH":
        return x
    x = jnp.swapaxes(x, 1, 2)
    return x if layout == "BTNH" else x[0]


def lse_from_bnt(lse: jax.Array, layout: str) -> jax.Array:
    """Return the log-sum-exp as the call gives it: (B, N, T), or (N, total) when packed."""
    return lse[0] if layout == "packed" else lse


def grouped(x: jax.Array, kv_heads: int) -> jax.Array:
    """Return (B, N, ...) as (B, K, N // K, ...): the heads of a group get a dim of their own."""
    return x.reshape(x.shape[0], kv_heads, x.shape[1] // max(kv_heads, 1), *x.shape[2:])


def joined(x: jax.Array) -> jax.Array:
    """Undo :func:`grouped`."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
