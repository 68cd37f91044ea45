"""The mask of one query over a cache of fixed length, in two tensors that change from step to step.

What code was compiled for stays the same while a sequence grows: two lengths for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.integrations.transformers.composed import factory_of, held
from polyattn.integrations.transformers.padding import Bounds, bounds_of, is_readable, keys_of
from polyattn.masks import Dense, LeftPadding, Mask, Padding

__all__ = ["range_of_one_query"]


def range_of_one_query(
    function: Callable[..., Any],
    attention_mask: Tensor | None,
    batch: int,
    keys: int,
    q_offset: Any,
    kv_offset: Any,
    device: Any,
) -> Mask | None:
    """Return the mask of one query at `q_offset`, or None if its keys are not one range.

    `q_offset` and `kv_offset` may be tensors, whose values are not read.

    >>> from transformers.masking_utils import sliding_window_causal_mask_function
    >>> function = sliding_window_causal_mask_function(4)
    >>> mask = range_of_one_query(function, None, 2, 16, torch.tensor(9), 0, "cpu")
    >>> mask, mask.parts[0].kv_starts.tolist(), mask.parts[1].kv_lengths.tolist()
    (LeftPadding(q=None, kv=2) & Padding(q=None, kv=2), [6, 6], [10, 10])
    """
    place = torch.as_tensor(q_offset, device=device) - kv_offset
    found = _range(function, place, kv_offset)
    if found is None:
        return None
    start, end = found
    extra: Mask | None = None
    if attention_mask is not None:
        bounds, extra = _told(attention_mask, batch, keys, kv_offset)
        if bounds is not None:
            end = torch.minimum(end, bounds.ends)
            start = bounds.starts if start is None else torch.maximum(start, bounds.starts)
    # contiguous int64, as kernels read them: every layer would make them so anew
    ends = end.clamp(max=keys).to(torch.int64).expand(batch).contiguous()
    if start is None:
        starts = torch.zeros(batch, dtype=torch.int64, device=device)
    else:  # one that begins after its end is empty in both
        starts = torch.minimum(start.clamp(min=0), ends).expand(batch).contiguous()
    mask = LeftPadding(kv_starts=starts) & Padding(kv_lengths=ends)
    return mask if extra is None else mask & extra


def _told(
    attention_mask: Tensor, batch: int, keys: int, kv_offset: int
) -> tuple[Bounds | None, Mask | None]:
    """Return where the real tokens are, or the mask of them if they are not together."""
    readable = is_readable(attention_mask)
    told = attention_mask.shape[1] - kv_offset
    if readable and bool(attention_mask.all()):
        if told >= keys:
            return None, None
        numbers = [attention_mask.new_full((), x, dtype=torch.int64) for x in (0, told)]
        return Bounds(*numbers), None
    real = keys_of(attention_mask, batch, kv_offset, keys)
    bounds = bounds_of(real) if readable else None
    return (None, Dense(real[:, None, None, :])) if bounds is None else (bounds, None)


def _range(function: Any, place: Tensor, kv_offset: Any) -> tuple[Tensor | None, Tensor] | None:
    """Return the first key that is seen (None: the very first) and that after the last."""
    kind = factory_of(function)
    if kind == "causal":
        return None, place + 1
    if kind != "and":
        return None
    start, end = None, None
    for member in held(function, "mask_functions"):
        first = _first_key(member, place, kv_offset)
        found = (first, None) if first is not None else _range(member, place, kv_offset)
        if found is None:
            return None
        if found[0] is not None:
            start = found[0] if start is None else torch.maximum(start, found[0])
        if found[1] is not None:
            end = found[1] if end is None else torch.minimum(end, found[1])
    return None if end is None else (start, end)


def _first_key(function: Any, place: Tensor, kv_offset: Any) -> Tensor | None:
    kind = factory_of(function)
    if kind == "window":
        return place - (held(function, "sliding_window") - 1)
    if kind == "chunk":  # its end is after the query's own key
        size, skipped = held(function, "chunk_size"), held(function, "left_padding")
        position = place + kv_offset - skipped
        return position // size * size + skipped - kv_offset
    return None
