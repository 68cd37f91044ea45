"""The gradients of a ring, each brought home to the rank whose keys it is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = ["ring_gradients"]


def ring_gradients(
    of_keys: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's query, key and value, those from all ranks added up.

    `of_keys`: the gradients of query, key and value that come of some rank's keys and values.
    One rank's keys are with all the others at a time, so that no more is held than of two ranks.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    mine = torch.cat([key.flatten(), value.flatten()])
    grad_query = torch.zeros_like(query, dtype=wide)
    grad_keys = torch.empty_like(mine, dtype=wide)
    for source in range(dist.get_world_size(group)):
        is_here = source == dist.get_rank(group)
        there = mine if is_here else torch.empty_like(mine)
        dist.broadcast(there, group=group, group_src=source)
        step = of_keys(*_parted(there, key, value))
        grad_query += step[0]
        sums = torch.cat([one.to(wide).flatten() for one in step[1:]])
        dist.reduce(sums, group=group, group_dst=source)
        if is_here:
            grad_keys = sums
    return grad_query, *_parted(grad_keys, key, value)


def _parted(both: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    at = key.numel()
    return both[:at].view(key.shape), both[at:].view(value.shape)
