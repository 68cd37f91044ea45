"""The simplest mask that allows exactly the pairs of a boolean array."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.masks import Causal, Dense, Mask

__all__ = ["mask_allowing", "narrowed"]


def narrowed(pairs: Tensor) -> Tensor:
    """Return (B, N, T, S) with one entry of the batch, and one head, where all are one in memory.

    >>> narrowed(torch.ones(3, 3).expand(2, 4, 3, 3)).shape
    torch.Size([1, 1, 3, 3])
    """
    for dim in (0, 1):
        if pairs.shape[dim] > 1 and pairs.stride(dim) == 0:
            pairs = pairs.narrow(dim, 0, 1)
    return pairs


def mask_allowing(seen: Tensor) -> Mask | None:
    """Return the mask that allows the pairs `seen`, (B|1, N|1, T, S) bool; None allows all.

    >>> mask_allowing(torch.ones(1, 1, 3, 4).tril().bool())
    Causal('top_left')
    >>> mask_allowing(torch.ones(1, 1, 3, 4).bool()) is None
    True
    """
    if seen.shape[:2] != (1, 1) or seen.numel() == 0:
        return Dense(seen)
    # the corner tells most masks apart before all of the array is looked at
    first = seen[0, 0, 0]
    if bool(first.all()) and bool(seen.all()):
        return None
    if not bool(first[1:].any()) and torch.equal(seen[0, 0], torch.ones_like(seen[0, 0]).tril()):
        return Causal("top_left")
    return Dense(seen)
