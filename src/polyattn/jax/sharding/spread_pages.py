"""Keys in pages over a mesh: sequences and heads are spread, pages lie with their heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from polyattn.jax.sharding.axes import Axis
from polyattn.jax.sharding.key_heads import KeyHeads
from polyattn.jax.sharding.placing import placed
from polyattn.jax.sharding.specs import check_divides

__all__ = ["over_pages"]


def over_pages(
    mesh: Any,
    spread: tuple[Axis, Axis],
    attend: Callable[..., Any],
    arrays: tuple[Any, ...],
    head_dim: int,
) -> Any:
    """Return (out, lse) of `attend`, called with each device's share of sequences and heads.

    `spread`: the axes of the mesh of batch and of heads. `arrays`: query, pages of keys and of
    values, block table, lengths, and sinks or None. Each device has the pages of the key heads
    that its query heads read, all of them.
    """
    batch, head = spread
    rows = PartitionSpec(batch, *(head if dim == head_dim else None for dim in range(1, 4)))
    check_divides("query", tuple(arrays[0].shape), rows, mesh)
    heads, kv_heads = (int(x.shape[head_dim]) for x in arrays[:2])
    keys = KeyHeads.of(mesh, head, heads, kv_heads)
    pages = PartitionSpec(*(keys.axis if dim == head_dim else None for dim in range(4)))
    of_sequences = PartitionSpec(batch, None), PartitionSpec(batch)
    sinks = arrays[5]
    of_sinks = None if sinks is None else PartitionSpec(head, *(None,) * (sinks.ndim - 1))
    specs = (rows, pages, pages, *of_sequences, of_sinks)

    def shared(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return attend(q, keys.mine(k, head_dim), keys.mine(v, head_dim), *rest)

    run = jax.shard_map(
        shared, mesh=mesh, in_specs=specs,
        out_specs=(rows, PartitionSpec(batch, head, None)), check_vma=False,
    )  # fmt: skip
    # compiled: JAX cannot run a kernel with a rule of its own for gradients under it eagerly
    return jax.jit(run)(*placed(mesh, arrays, specs))
