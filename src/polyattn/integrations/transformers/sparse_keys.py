"""The keys that a model's own indexer chose for each query, as a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.errors import Unsupported
from polyattn.masks import BlockMap, Dense, Mask

__all__ = ["listed_blocks", "listed_keys"]


def listed_keys(indices: Tensor, keys: int) -> Mask:
    """Return the mask of the listed keys: `indices` (B, T, M); those below 0 are none.

    >>> import torch
    >>> print(listed_keys(torch.tensor([[[0, 2], [1, -1]]]), 3).picture(2, 3))
    #.#
    .#.
    """
    batch, queries, _ = indices.shape
    places = torch.where(indices < 0, keys, indices).long()  # to a column that is dropped
    allowed = torch.zeros(batch, queries, keys + 1, dtype=torch.bool, device=indices.device)
    return Dense(allowed.scatter(-1, places, True)[..., :keys].unsqueeze(1))


def listed_blocks(indices: Tensor, module: Any, heads: int) -> Mask:
    """Return the mask of the listed blocks: `indices` (B, n, T, M), each -1 after all others.

    The blocks are of as many keys as the module's indexer says, each of its n heads is for as many
    query heads.
    """
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int) or heads % indices.shape[1]:
        raise Unsupported(
            f"got block_indices of {type(module).__name__}, expected a module whose indexer has a "
            "block_size, and heads that divide the query's."
        )
    of_heads = indices.repeat_interleave(heads // indices.shape[1], dim=1)
    counts = (of_heads >= 0).sum(-1).to(torch.int32)
    return BlockMap(1, size, of_heads.clamp(min=0).to(torch.int32), counts)
