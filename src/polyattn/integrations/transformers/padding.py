"""A padding mask of transformers, (B, L) with True for a real token, as a mask of polyattn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyattn.integrations.transformers.library import library
from polyattn.masks import Dense, Full, LeftPadding, Mask, Padding
from polyattn.torch.internals import are_transforms_active
from polyattn.torch.kit.masking import is_traced_by_proxies

__all__ = ["Bounds", "bounds_of", "is_readable", "keys_of", "padding_mask"]


class Bounds(NamedTuple):
    """The real tokens of each batch entry: from `starts` on, up to but not with `ends`; (B,)."""

    starts: Tensor
    ends: Tensor


def keys_of(attention_mask: Tensor, batch: int, first: int, keys: int) -> Tensor:
    """Return (B, S) booleans for `keys` keys from token `first` on; what is not told is padding."""
    told = attention_mask[:, first : first + keys].to(torch.bool)
    missing = keys - told.shape[1]
    if missing:
        told = torch.nn.functional.pad(told, (0, missing))
    return told.expand(batch, -1)


def is_readable(tensor: Tensor) -> bool:
    """Say whether the values of a tensor may be read here: not while anything traces."""
    if tensor.is_meta:  # it has none: a model is run for its shapes
        return False
    return not (library().is_tracing(tensor) or are_transforms_active() or is_traced_by_proxies())


def bounds_of(real: Tensor) -> Bounds | None:
    """Read, once, where the real tokens of (B, S) are; None if they are not together."""
    counts, ahead = real.sum(-1), real.int().argmax(-1)
    behind = real.flip(-1).int().argmax(-1)
    some = counts > 0
    starts, ends = ahead * some, (real.shape[1] - behind) * some
    if bool((ends - starts != counts).any()):
        return None
    return Bounds(starts, ends)  # int64, as kernels read them


def padding_mask(real: Tensor) -> Mask:
    """Return the mask that hides the padding of (B, S) keys, as small as it can be said.

    Read once: nothing to hide is ``Full()``, padding on the left is a LeftPadding, on the right a
    Padding, anything else, and what cannot be read, a Dense of (B, 1, 1, S).

    >>> import torch
    >>> rows = torch.tensor([[0, 1, 1], [1, 1, 1]]).bool()
    >>> padding_mask(rows), padding_mask(rows.flip(1)), padding_mask(rows | True)
    (LeftPadding(q=None, kv=2), Padding(q=None, kv=2), Full())
    """
    if not is_readable(real):
        return Dense(real[:, None, None, :])
    if real.all():
        return Full()
    bounds = bounds_of(real)
    if bounds is None:
        return Dense(real[:, None, None, :])
    mask: Mask = Full()
    if bool((bounds.starts > 0).any()):
        mask = LeftPadding(kv_starts=bounds.starts)
    if bool((bounds.ends < real.shape[1]).any()):
        mask = mask & Padding(kv_lengths=bounds.ends)
    return mask
