"""The mask that a fused layer is handed, as a mask of polyattn's that hides the same.

torch's operator takes any array for a boolean one: what is not zero hides. It fills rows that see
no key with NaN, which no mask of polyattn's does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.integrations.seen_pairs import mask_allowing, narrowed
from polyattn.masks import Dense, Mask, Padding

__all__ = ["ROWLESS", "mask_of"]

ROWLESS = "rows that see no key, for which torch gives NaN"
"""Why a call is left to torch, in place of a mask."""


def mask_of(
    hidden: Tensor | None, mask_type: int | None, sizes: tuple[int, int, int]
) -> Mask | str | None:
    """Return the mask of a layer with (B, N, T) `sizes`, or why there is none.

    `hidden`: (B, T) where `mask_type` is 1, (T, T) or (B, N, T, T) otherwise; not zero = hidden.

    >>> mask_of(torch.tensor([[False, True], [False, False]]), 1, (2, 4, 2))
    Padding(q=None, kv=2)
    >>> mask_of(torch.ones(3, 3).triu(1), 0, (2, 4, 3))
    Causal('top_left')
    >>> mask_of(torch.ones(2, 2), 1, (2, 4, 2))
    'rows that see no key, for which torch gives NaN'
    """
    if hidden is None:
        return None
    b, n, t = sizes
    shape = tuple(hidden.shape)
    if mask_type == 1 and shape == (b, t):
        return _of_keys(hidden)
    if shape == (t, t) and mask_type != 1:
        return _of_pairs(hidden[None, None])
    if shape == (b, n, t, t):
        return _of_pairs(hidden)
    return f"a mask of shape {shape}"


def _of_keys(hidden: Tensor) -> Mask | str | None:
    seen = ~hidden.bool()
    lengths = seen.sum(1)
    fewest = int(lengths.min()) if lengths.numel() else seen.shape[1]
    if fewest == 0:
        return ROWLESS
    if fewest == seen.shape[1]:
        return None
    if torch.equal(seen, torch.arange(seen.shape[1], device=seen.device) < lengths[:, None]):
        return Padding(kv_lengths=lengths.int())
    return Dense(seen[:, None, None])


def _of_pairs(hidden: Tensor) -> Mask | str | None:
    seen = ~narrowed(hidden).bool()
    return mask_allowing(seen) if bool(seen.any(-1).all()) else ROWLESS
