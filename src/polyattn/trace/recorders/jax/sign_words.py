"""The sketch's words of signs: splitmix64 in two halves of 32 bits, since JAX may lack 64."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

__all__ = ["sign_words"]

_Wide = tuple[Array, Array]
"""The low and the high half."""


def sign_words(count: int) -> _Wide:
    """Return splitmix64 of 0, 1, ..., count - 1 as low and high halves.

    >>> low, high = sign_words(1)
    >>> int(low[0]) + (int(high[0]) << 32)
    16294208416658607535
    """
    low = lax.iota(jnp.uint32, count)
    z = _plus((low, jnp.zeros_like(low)), 0x9E3779B97F4A7C15)
    z = _times(_mixed(z, 30), 0xBF58476D1CE4E5B9)
    z = _times(_mixed(z, 27), 0x94D049BB133111EB)
    return lax.optimization_barrier(_mixed(z, 31))  # or it is computed again for each element


def _halves(constant: int) -> tuple[Array, Array]:
    return jnp.uint32(constant & 0xFFFFFFFF), jnp.uint32(constant >> 32)


def _mixed(z: _Wide, places: int) -> _Wide:
    """``z ^ (z >> places)``."""
    low, high = z
    return low ^ ((low >> places) | (high << (32 - places))), high ^ (high >> places)


def _plus(z: _Wide, constant: int) -> _Wide:
    low, high = _halves(constant)
    total = z[0] + low
    return total, z[1] + high + (total < low).astype(jnp.uint32)


def _times(z: _Wide, constant: int) -> _Wide:
    low, high = _halves(constant)
    return z[0] * low, _carried(z[0], low) + z[0] * high + z[1] * low


def _carried(a: Array, b: Array) -> Array:
    """The high half of the product of two halves."""
    a0, a1, b0, b1 = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    middle = a1 * b0 + ((a0 * b0) >> 16)
    other = a0 * b1 + (middle & 0xFFFF)
    return a1 * b1 + (middle >> 16) + (other >> 16)
