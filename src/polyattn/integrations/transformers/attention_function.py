"""The attention function that is registered, called as transformers calls its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.errors import InvalidProblem, Unsupported
from polyattn.integrations.transformers.keywords import refuse_unknown
from polyattn.integrations.transformers.library import is_eager_only, library
from polyattn.integrations.transformers.mask_value import AttentionMaskValue
from polyattn.integrations.transformers.packed_sequences import (
    PACKED,
    attend_paged,
    attend_sequences,
    refuse_beyond_order,
    sequences_of,
)
from polyattn.integrations.transformers.sparse_keys import listed_blocks, listed_keys
from polyattn.masks import Causal, Dense, Mask
from polyattn.masks.biases import Bias, DenseBias
from polyattn.torch.api import attention

__all__ = ["polyattn_attention"]


def polyattn_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | Tensor | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention of query (B, N, T, H) with key (B, K, S, H) and value (B, K, S, V).

    `attention_mask`: what the registered mask function makes, or a tensor of booleans or floats
    that broadcasts to (B, N, T, S). `scaling`, `softcap`, `dropout`: as in
    :func:`polyattn.torch.attention`. `s_aux`: (N,) sinks; `sinks`: (B, N, T, 1), of each query.
    `position_bias`: broadcasts to (B, N, T, S), added to the scores. `indices` (B, T, M): the keys
    that each query may see; `block_indices` (B, n, T, M): blocks of keys, -1 for none. `cache`: the
    pages of continuous batching. Without a mask `is_causal`, or the module's, is from the top left.

    Returns (B, T, N, V), contiguous, and None in the place of probabilities. A keyword that is not
    understood is an :class:`~polyattn.errors.Unsupported`.
    """
    refuse_unknown(kwargs, PACKED)
    options: dict[str, Any] = {
        "scale": scaling, "softcap": softcap, "sinks": s_aux, "dropout_p": dropout,
        "deterministic": deterministic,
    }  # fmt: skip
    if isinstance(scaling, Tensor):
        query, options["scale"] = query * scaling, 1.0
    if cache is not None and not isinstance(cache, library().paged_cache):
        raise Unsupported(f"got cache={type(cache).__name__}, expected a PagedAttentionCache.")
    extras = (position_bias, sinks, indices, block_indices)
    if cache is not None and not isinstance(attention_mask, Tensor):
        _refuse_extras(extras)
        refuse_beyond_order(attention_mask)
        return attend_paged(module, query, key, value, cache, options, kwargs), None
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx, kwargs=kwargs)
    query, key, value = _same_batch(query, key, value)
    sequences = sequences_of(attention_mask, query, kwargs) if cache is None else None
    if sequences is not None:
        _refuse_extras(extras)
        causal = _is_causal(module, is_causal) and attention_mask is None
        return attend_sequences(sequences, causal, query, key, value, options), None
    if attention_mask is None and query.shape[2] > 1 and _is_causal(module, is_causal):
        if key.shape[2] > query.shape[2]:  # of a cache that has not been written further
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        attention_mask = Causal("top_left")
    mask, bias, keys = _told(attention_mask, query, key)
    if keys != key.shape[2]:
        key, value = key[:, :, :keys], value[:, :, :keys]
    if position_bias is not None:
        position_bias = position_bias[..., :keys]
        bias = position_bias if bias is None else bias + position_bias
    if indices is not None:
        mask = _joined(mask, listed_keys(indices, keys))
    if block_indices is not None:
        mask = _joined(mask, listed_blocks(block_indices, module, query.shape[1]))
    added: Bias | None = None if bias is None else DenseBias(bias)
    return _attend(query, key, value, mask, added, sinks, options), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    bias: Bias | None,
    sinks: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    arrays = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if sinks is None:
        return attention(*arrays, mask=mask, bias=bias, **options).contiguous()
    if options["sinks"] is not None:
        raise Unsupported("got sinks and s_aux in one call, expected one of them.")
    out, lse = attention(*arrays, mask=mask, bias=bias, return_lse=True, **options)
    # a sink takes its share of each query's probabilities: exp(lse) / (exp(lse) + exp(sink))
    kept = torch.sigmoid(lse - sinks.squeeze(-1).to(lse.dtype)).transpose(1, 2).unsqueeze(-1)
    return (out * kept).to(out.dtype).contiguous()


def _told(attention_mask: Any, query: Tensor, key: Tensor) -> tuple[Any, Tensor | None, int]:
    """Return the mask, what is added to the scores, and how many keys they are about."""
    keys = key.shape[2]
    if attention_mask is None or isinstance(attention_mask, Mask):
        return attention_mask, None, keys
    if isinstance(attention_mask, AttentionMaskValue):
        batch, _, rows, columns = attention_mask.sizes
        if columns != keys or rows not in (1, query.shape[2]):
            raise InvalidProblem(
                f"got a mask of {rows} queries and {columns} keys, expected one of "
                f"{query.shape[2]} and {keys}, which the layer has."
            )
        if batch != query.shape[0] or rows != query.shape[2]:
            return Dense(attention_mask.dense()), None, keys  # made for one, and meant for all
        return attention_mask.mask, None, attention_mask.limit
    if not isinstance(attention_mask, Tensor):
        raise Unsupported(
            f"got a mask of type {type(attention_mask).__name__}, expected one that was made "
            'while attn_implementation="polyattn", or a tensor.'
        )
    if attention_mask.dtype == torch.bool:
        return Dense(attention_mask), None, keys
    return None, attention_mask, keys


def _is_causal(module: Any, asked: bool | None) -> bool:
    """Return what holds where no mask was made: what the call or its module says, else no.

    transformers' sdpa takes silence for yes, since it gets no mask for what is plainly causal; the
    mask function here always makes one. Eager takes it for no, as do models that have no other.
    """
    if asked is None and not is_eager_only(module):
        asked = getattr(module, "is_causal", False)
    return bool(asked)


def _same_batch(*arrays: Tensor) -> list[Tensor]:
    """Give a batch of one, such as learned queries, the size of the others."""
    batch = max(x.shape[0] for x in arrays)
    return [x if x.shape[0] == batch else x.expand(batch, -1, -1, -1) for x in arrays]


def _joined(mask: Mask | None, other: Mask) -> Mask:
    return other if mask is None else mask & other


def _refuse_extras(extras: tuple[Any, ...]) -> None:
    for name, given in zip(("position_bias", "sinks", "indices", "block_indices"), extras,
                           strict=True):  # fmt: skip
        if given is not None:
            raise Unsupported(
                f"got {name} beside packed sequences, expected a mask over (B, N, T, S) there."
            )
