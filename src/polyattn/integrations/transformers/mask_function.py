"""The mask function that is registered: what a call hides, as a mask of polyattn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from polyattn.integrations.transformers.composed import factory_of, hides_the_future
from polyattn.integrations.transformers.frame import Frame
from polyattn.integrations.transformers.library import configures_eager_only, library
from polyattn.integrations.transformers.looked_at import band
from polyattn.integrations.transformers.mask_value import AttentionMaskValue
from polyattn.integrations.transformers.one_query import range_of_one_query
from polyattn.integrations.transformers.padding import is_readable, keys_of, padding_mask, rows_of
from polyattn.integrations.transformers.reading import read
from polyattn.integrations.transformers.traced_masks import traced_mask
from polyattn.masks import Full, Mask, Padding
from polyattn.masks.simplify import simplify

__all__ = ["polyattn_mask"]

_EXTENDED = frozenset({"deepseek_v4"})
"""Models that append columns of their own to the mask, if it is a tensor of what is added."""


def polyattn_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Any = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> AttentionMaskValue | Tensor | None:
    """Return what transformers' ``sdpa_mask`` says, without making the (B, 1, T, S) tensor.

    Takes what transformers gives its mask functions. Masks that its own factories compose become
    values; other functions are evaluated, to a tensor of booleans. None where nothing is hidden
    and the caller allows that.

    >>> polyattn_mask(2, 8, 8)
    AttentionMaskValue(Causal(), (2, 1, 8, 8))
    """
    if isinstance(attention_mask, AttentionMaskValue):
        return attention_mask  # prepared before, as for compiled decoding
    masking = library().masking
    function = masking.causal_mask_function if mask_function is None else mask_function
    evaluated = {
        "q_offset": q_offset, "kv_offset": kv_offset, "mask_function": function,
        "attention_mask": attention_mask, "use_vmap": use_vmap, "device": device,
    }  # fmt: skip
    found: Mask | None = None
    limit = kv_length
    sizes = (batch_size, q_length, kv_length)
    if getattr(config, "model_type", "") in _EXTENDED:
        return masking.eager_mask(*sizes, **evaluated, **kwargs)
    if attention_mask is None or attention_mask.ndim == 2:
        call = (function, attention_mask, *sizes, q_offset, kv_offset, device)
        if is_dynamo_compiling():
            window = _window_of(config, local_size)
            found = traced_mask(*call, window, allow_is_causal_skip, allow_is_bidirectional_skip)
        else:
            found, limit = _mask(*call, allow_is_causal_skip, use_vmap)
    looks = configures_eager_only(config)
    if found is None and looks:
        return masking.eager_mask(*sizes, **evaluated, **kwargs)
    if found is None:
        unskipped = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masking.sdpa_mask(*sizes, **evaluated, **unskipped, **kwargs)
    if isinstance(found, Full) and allow_is_bidirectional_skip:
        return None
    shape = (batch_size, 1, q_length, kv_length)
    added = kwargs.get("dtype", torch.float32) if looks else None
    return AttentionMaskValue(found, shape, limit=limit, device=device, added=added)


def _mask(
    function: Any,
    attention_mask: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    q_offset: Any,
    kv_offset: Any,
    device: Any,
    may_be_skipped: bool,
    use_vmap: bool,
) -> tuple[Mask | None, int]:
    """Return the mask and the number of keys that it is about; None if it is not known.

    `may_be_skipped` is False for a cache of fixed length while it decodes.
    """
    if attention_mask is not None:
        attention_mask = rows_of(attention_mask, batch)
    symbolic = isinstance(q_offset, Tensor)
    if queries == 1 and (symbolic or not may_be_skipped or q_offset - kv_offset != keys - 1):
        one = range_of_one_query(function, attention_mask, batch, keys, q_offset, kv_offset, device)
        if one is not None:
            return one, keys
    if symbolic:
        if not is_readable(q_offset):
            return None, keys
        q_offset = int(q_offset)
    frame = Frame(batch, queries, keys, q_offset, kv_offset, device)
    if hides_the_future(function):
        frame = frame.without_the_future()
    told: Mask = Full()
    if attention_mask is not None:
        told = padding_mask(keys_of(attention_mask, batch, kv_offset, frame.keys))
    found = read(function, frame, attention_mask is not None and _begins_late(told, kv_offset))
    if found is None and factory_of(function) in (None, "and", "or"):
        found = band(function, frame, use_vmap)
    if found is None:
        return None, keys
    whole = found & told
    if queries == 1:  # which sees all that a causal mask leaves it: each layer would find that out
        simple = simplify(whole, queries, frame.keys)
        whole = Full() if simple is None else simple
    return whole, frame.keys


def _begins_late(told: Mask, kv_offset: int) -> bool:
    """Say whether some sequence may begin with padding, here or before the keys that are here."""
    return kv_offset > 0 or not isinstance(told, (Full, Padding))


def _window_of(config: Any, local_size: int | None) -> int | None:
    """Return the size of the window that a call is about, if its config says so."""
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    return local_size if local_size == window and local_size != chunk else None
