"""Which key/value heads a device needs whose query heads lie over some mesh axes.

Query head n reads key/value head n // (N // K), wherever both were stored. So the axes of the query
heads say what a device computes, and its key heads follow from them: a share of them where they
divide, else some that its neighbours have too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyattn.jax.sharding.axes import Axis
from polyattn.jax.sharding.specs import axis_names

__all__ = ["KeyHeads"]


class KeyHeads(NamedTuple):
    """Where the key/value heads of a device's query heads are.

    `axis`: what they are spread over, the first of the query heads' axes; along `shared`, the
    others, devices get the same heads and pick theirs. `own`: query heads of a device, `group`:
    N // K.
    """

    axis: Axis
    shared: tuple[str, ...]
    own: int
    group: int

    @classmethod
    def of(cls, mesh: Any, head: Axis, heads: int, kv_heads: int) -> KeyHeads:
        """Return where key heads are of `heads` query heads over `head`, which divides them.

        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("a", "b"))
        >>> KeyHeads.of(mesh, ("a", "b"), 16, 4)
        KeyHeads(axis='a', shared=('b',), own=2, group=4)
        """
        names, taken, devices = axis_names(head), 0, 1
        for name in names:
            if kv_heads % (devices * int(mesh.shape[name])):
                break
            devices *= int(mesh.shape[name])
            taken += 1
        spread, shared = names[:taken], names[taken:]
        for name in shared:
            devices *= int(mesh.shape[name])
        axis = spread[0] if len(spread) == 1 else spread or None
        return cls(axis, shared, heads // devices, heads // max(kv_heads, 1))

    def mine(self, x: jax.Array, dim: int) -> jax.Array:
        """Return the heads that this device's query heads read; within ``jax.shard_map``.

        Where its query heads are no whole groups and no part of one, the heads are repeated: each
        query head gets its own.
        """
        if not self.shared:
            return x
        first = jax.lax.axis_index(self.shared) * self.own
        if self.group % self.own == 0:
            return jax.lax.dynamic_slice_in_dim(x, first // self.group, 1, dim)
        return jnp.take(x, (first + jnp.arange(self.own)) // self.group, axis=dim)
