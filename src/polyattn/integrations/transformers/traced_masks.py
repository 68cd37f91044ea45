"""Masks inside ``torch.compile``, where what a closure holds cannot be read.

A mask function that the compiler traces is known by its identity and by the code it runs. What is
not known so is evaluated in the graph, as transformers' own mask function does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.integrations.transformers.library import library
from polyattn.integrations.transformers.padding import keys_of
from polyattn.masks import Causal, Dense, Full, LeftPadding, Mask, Padding, Window

__all__ = ["traced_mask"]


def traced_mask(
    function: Any,
    attention_mask: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    q_offset: Any,
    kv_offset: Any,
    device: Any,
    window: int | None,
    may_skip_causal: bool,
    may_skip_both_sides: bool,
) -> Mask | None:
    """Return the mask, or None if it is to be evaluated.

    `window`: the size of the config's window, where the call is about one. A function that two
    others are joined in is the windowed one where that is said and the caller has added nothing,
    which it says by allowing to skip the mask.
    """
    masking = library().masking
    sides = "none"
    if function is masking.causal_mask_function:
        sides, window = "left", None
    elif function is masking.bidirectional_mask_function:
        sides = "both"
        window = None
    elif window is not None and function.__code__ is library().joined:
        sides = "left" if may_skip_causal else "both" if may_skip_both_sides else "none"
    if sides == "none":
        return None
    if isinstance(q_offset, Tensor):
        found = _of_one(sides, window, batch, queries, keys, q_offset - kv_offset, device)
    else:
        found = _of_positions(sides, window, queries, keys, q_offset - kv_offset)
    if found is None or attention_mask is None:
        return found
    return found & Dense(keys_of(attention_mask, batch, kv_offset, keys)[:, None, None, :])


def _of_positions(
    sides: str, window: int | None, queries: int, keys: int, distance: Any
) -> Mask | None:
    if sides == "both" and window is None:
        return Full()
    if distance != keys - queries:
        top_left = sides == "left" and window is None and distance == 0
        return Causal("top_left") if top_left else None
    if window is None:
        return Causal()
    return Causal() & Window(window - 1) if sides == "left" else Window(window, window)


def _of_one(
    sides: str, window: int | None, batch: int, queries: int, keys: int, place: Tensor, device: Any
) -> Mask | None:
    """Return the mask of one query of a cache of fixed length, whose place is a tensor."""
    if sides == "both":
        return Full() if window is None else None
    if queries != 1:
        return None
    ends = (place + 1).clamp(max=keys).to(torch.int32)
    mask: Mask = Padding(kv_lengths=ends.expand(batch))
    if window is not None:
        starts = (place - (window - 1)).clamp(min=0).to(torch.int32)
        mask = LeftPadding(kv_starts=starts.expand(batch)) & mask
    return mask
