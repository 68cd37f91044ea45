"""The memory that a compiled call needs beside its arguments and results, as XLA counts it.

The scratch of the native kernels is not in it: that is a tile or two for each thread.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyattn.jax import attention, explain
from polyattn.selection import Accepted

__all__ = ["rows"]


def rows(length: int) -> list[dict[str, Any]]:
    """Return, for each way, MiB at `length` queries and keys and at twice as many, 8 heads of 64.

    `grows`: the second over the first: 2 where memory is O(T), 4 where it is O(T^2).
    """
    found = []
    for name, call in _ways(length).items():
        one, two = (_temporary(call, n) for n in (length, 2 * length))
        grows = two / one if one else None
        found.append({"name": name, "mib": [one, two], "grows": grows and round(grows, 2)})
    return found


def _ways(length: int) -> dict[str, Any]:
    x = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)
    ways: dict[str, Any] = {"jax.nn": jax.nn.dot_product_attention}
    for name, decision in explain(x, x, x).decisions.items():
        if isinstance(decision, Accepted):
            ways[name] = lambda q, k, v, name=name: attention(q, k, v, backend=name)
    return ways


def _temporary(call: Any, length: int) -> float:
    x = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)
    found = jax.jit(call).lower(x, x, x).compile().memory_analysis()
    return round(float(found.temp_size_in_bytes) / 2**20, 3)
