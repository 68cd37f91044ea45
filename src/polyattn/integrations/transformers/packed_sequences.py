"""Several sequences in one row of tokens: continuous batching, and rows without padding."""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.errors import Unsupported
from polyattn.integrations.transformers.mask_value import AttentionMaskValue
from polyattn.integrations.transformers.padding import is_readable
from polyattn.masks import Causal, Chunked, Full, Mask, Packed, Window
from polyattn.torch.api import attention

__all__ = ["PACKED", "Sequences", "attend_paged", "attend_sequences", "refuse_beyond_order",
           "sequences_of"]  # fmt: skip

PACKED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index", "block_table",
                    "logits_indices", "logits_processor_args"})  # fmt: skip
"""Names of keywords that are about packed sequences."""


class Sequences(NamedTuple):
    """Where sequences begin in a row of queries and one of keys, and the mask within each."""

    cu_q: Tensor
    cu_k: Tensor
    mask: Mask | None


def sequences_of(attention_mask: Any, query: Tensor, given: dict[str, Any]) -> Sequences | None:
    """Return the sequences that a caller's ``cu_seq_lens`` name, unless the mask tells them.

    Masks made of ``position_ids`` do: they separate the same sequences.
    """
    cu_q, cu_k = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
    if cu_q is None and cu_k is None:
        return None
    if isinstance(attention_mask, Tensor):
        return None
    mask: Mask | None = None
    if isinstance(attention_mask, AttentionMaskValue):
        mask = attention_mask.mask
        if "Segments" in mask.kinds:
            return None
    within = mask is None or all(
        isinstance(leaf, (Causal, Chunked, Full, Window)) for leaf in mask.leaves()
    )
    if cu_q is None or cu_k is None or query.shape[0] != 1 or not within:
        raise Unsupported(
            f"got cu_seq_lens for a batch of {query.shape[0]} with the mask {mask!r}, expected "
            "one row of tokens, both cu_seq_lens_q and cu_seq_lens_k, and no padding."
        )
    return Sequences(cu_q, cu_k, mask)


def attend_sequences(
    sequences: Sequences,
    causal: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Compute attention within each sequence of a row; returns (1, T, N, V), contiguous."""
    mask = Causal() if causal and sequences.mask is None else sequences.mask
    cu_q, cu_k = _whole(sequences.cu_q, sequences.cu_k, query.shape[2], key.shape[2])
    packed: Mask = Packed(cu_q, cu_k)
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    joined = packed if mask is None else packed & mask
    return attention(*rows, mask=joined, layout="packed", **options).unsqueeze(0).contiguous()


def _whole(cu_q: Tensor, cu_k: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Return offsets that end with the row: what is after the last sequence is one of its own."""
    cu_q, cu_k = cu_q.to(torch.int32), cu_k.to(torch.int32)
    known = cu_q.device.type == "cpu" and is_readable(cu_q)
    if known and int(cu_q[-1]) == queries and int(cu_k[-1]) == keys:
        return cu_q, cu_k
    ends = cu_q.new_full((1,), queries), cu_k.new_full((1,), keys)
    return torch.cat([cu_q, ends[0]]), torch.cat([cu_k, ends[1]])


def attend_paged(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    options: dict[str, Any],
    given: dict[str, Any],
) -> Tensor:
    """Write keys and values (1, K, T, H) to their pages, and attend what the requests have there.

    Returns (1, T, N, V), contiguous.
    """
    if given.get("block_table") is not None:
        raise Unsupported(
            "got a block_table, which only transformers' flash attention asks for; expected the "
            "index that continuous batching makes otherwise."
        )
    window = given.get("sliding_window")
    kind: Any = type(cache)
    if _updates_keywords(kind):
        given = dict(given)
        sliding = cache.layer_to_allocator[module.layer_idx]
        window = getattr(sliding, "sliding_window", None)
        key, value = cache.update(key, value, module.layer_idx, kwargs=given)
        cu_k = given["cu_seq_lens_k"]
    else:  # versions before 5.19, in which the caller picks the layer's own lengths
        key, value = cache.update(
            key, value, module.layer_idx, read_index=given["read_index"],
            write_index=given["write_index"],
        )  # fmt: skip
        key, value = (x.transpose(0, 1).unsqueeze(0) for x in (key, value))
        cu_k = given["cu_seq_lens_k"]
        if isinstance(cu_k, dict):
            kind = "full_attention" if window in (None, 1) else "sliding_attention"
            cu_k = cu_k[kind] if kind in cu_k else next(iter(cu_k.values()))
    mask: Mask = Causal() if window in (None, 1) else Causal() & Window(left=window - 1)
    found = Sequences(given["cu_seq_lens_q"], cu_k, mask)
    return attend_sequences(found, True, query, key, value, options)


def refuse_beyond_order(attention_mask: Any) -> None:
    """Raise where a mask says more than which sequence a token is of, and what is before it.

    That much the pages tell; a model makes such a mask of the positions of the new tokens alone.
    """
    kinds = set() if attention_mask is None else attention_mask.mask.kinds
    if more := kinds - {"And", "Causal", "Full", "Segments", "Window"}:
        raise Unsupported(
            f"got a mask of {', '.join(sorted(more))} beside pages of continuous batching, "
            "expected causal attention, in a window or not."
        )


@functools.cache
def _updates_keywords(cache: type) -> bool:
    """Say whether the cache of this version picks the layer's own lengths itself."""
    return "kwargs" in inspect.signature(cache.update).parameters  # type: ignore[attr-defined]
