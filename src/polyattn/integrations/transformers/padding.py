"""A padding mask of transformers, (B, L) with True for a real token, as a mask of polyattn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyattn.errors import InvalidProblem
from polyattn.integrations.transformers.library import library
from polyattn.masks import Dense, Full, LeftPadding, Mask, Padding
from polyattn.torch.internals import are_transforms_active
from polyattn.torch.kit.masking import is_traced_by_proxies

__all__ = ["Bounds", "bounds_of", "is_readable", "keys_of", "padding_mask", "rows_of"]


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


def rows_of(attention_mask: Tensor, batch: int) -> Tensor:
    """Return the rows of (R, L) that are the batch's: the first, as the library indexes them."""
    rows = attention_mask.shape[0]
    if rows != 1 and rows < batch:
        raise InvalidProblem(
            f"got an attention_mask of {tuple(attention_mask.shape)} with a batch of {batch}, "
            f"expected {batch} rows, or one for all; repeat its rows as the inputs were repeated."
        )
    return attention_mask[:batch] if rows > batch else attention_mask


def is_readable(tensor: Tensor) -> bool:
    """Say whether the values of a tensor may be read here: not while anything traces."""
    if tensor.is_meta:  # it has none: a model is run for its shapes
        return False
    return not (library().is_tracing(tensor) or are_transforms_active() or is_traced_by_proxies())


def bounds_of(real: Tensor) -> Bounds | None:
    """Read, once, where the real tokens of (B, S) are; None if they are not together."""
    found = _bounds_in(real)
    return None if found is None else Bounds(*(_on(x, real.device) for x in found))


def _bounds_in(real: Tensor) -> tuple[list[int], list[int]] | None:
    """Return the same as numbers, in few calls: it is asked for each token.

    A row's bytes without the zeros at both ends are what is real; no zero may be between.
    """
    batch, length = real.shape
    if length == 0:
        return [0] * batch, [0] * batch
    data = real.cpu().numpy().tobytes()
    starts, ends = [], []
    for at in range(0, batch * length, length):
        behind = data[at : at + length].lstrip(b"\0")
        inside = behind.rstrip(b"\0")
        if b"\0" in inside:
            return None
        start = length - len(behind) if inside else 0
        starts.append(start)
        ends.append(start + len(inside))
    return starts, ends


def _on(lengths: list[int], device: torch.device) -> Tensor:
    """Return lengths as int64, as kernels read them."""
    return torch.tensor(lengths, dtype=torch.int64, device=device)


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
    found = _bounds_in(real)
    if found is None:
        return Dense(real[:, None, None, :])
    starts, ends = found
    mask: Mask = Full()
    if any(starts):
        mask = LeftPadding(kv_starts=_on(starts, real.device))
    if any(end < real.shape[1] for end in ends):
        mask = mask & Padding(kv_lengths=_on(ends, real.device))
    return mask
