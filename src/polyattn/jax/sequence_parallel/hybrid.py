"""Ulysses within a ring: heads are exchanged along one mesh axis, keys travel along another.

Source: Fang and Zhao, *USP: A Unified Sequence Parallelism Approach* (arXiv 2405.07719).
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import jax

from polyattn.jax.kit.own_promotion import own_promotion
from polyattn.jax.sequence_parallel.ring import ring_attention
from polyattn.jax.sequence_parallel.ulysses import exchanged
from polyattn.masks import Mask

__all__ = ["hybrid_attention"]

Array: TypeAlias = jax.Array


@own_promotion
def hybrid_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    axis_name: tuple[str, str] = ("ring", "ulysses"),
    mask: Mask | None = None,
    sinks: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    balance: str = "contiguous",
    return_lse: bool = False,
    backend: str | tuple[str, ...] | None = None,
    unroll: bool = False,
) -> Any:
    """Compute attention over a sequence spread along two mesh axes, within ``jax.shard_map``.

    `query` (B, T / P, N, H), `key` and `value` (B, S / P, K, H): the rows of this device, of
    P = R * U along `axis_name` = (ring, exchange); device (r, u) holds part r * U + u, as
    ``PartitionSpec(None, axis_name)`` lays it out. Heads are to the exchange what they are to
    :func:`~polyattn.jax.sequence_parallel.ulysses.ulysses_attention`; all else, `balance` over the
    R of the ring too, is that of :func:`~polyattn.jax.sequence_parallel.ring.ring_attention`.

    Returns out (B, T / P, N, V), with `return_lse` also the log-sum-exp (B, N, T / P) float32.
    Raises :class:`~polyattn.errors.InvalidProblem` while tracing for what either cannot do.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> axes = ("ring", "ulysses")
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), axes)
    >>> rows = jax.sharding.PartitionSpec(None, axes)
    >>> x = jnp.ones((1, 8, 2, 4))
    >>> run = jax.shard_map(
    ...     lambda x: hybrid_attention(x, x, x), mesh=mesh, in_specs=rows, out_specs=rows,
    ... )
    >>> run(x).shape
    (1, 8, 2, 4)
    """
    ring, exchange = axis_name
    inner = functools.partial(
        ring_attention, axis_name=ring, scale=scale, softcap=softcap, balance=balance,
        backend=backend, unroll=unroll,
    )  # fmt: skip
    out, lse = exchanged(inner, query, key, value, mask, sinks, exchange)
    return (out, lse) if return_lse else out
