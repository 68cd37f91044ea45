"""A call of diffusers' dispatcher, run on this process alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.errors import InvalidProblem
from polyattn.masks import Causal, Dense, Mask
from polyattn.masks.biases import DenseBias
from polyattn.torch.api import attention

__all__ = ["attend", "over_four_dims"]


def over_four_dims(attn_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a mask whose dims are those of the scores: of (B, S) the keys are meant."""
    if attn_mask is None or attn_mask.ndim != 2:
        return attn_mask
    if attn_mask.shape[0] == query.shape[0] and attn_mask.shape[1] == key.shape[1]:
        return attn_mask[:, None, None, :]
    return attn_mask


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
) -> Any:
    """Run the call here; the log-sum-exp in diffusers' layout."""
    mask: Mask | None = Causal("top_left") if is_causal else None
    bias = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        if mask is not None:
            raise InvalidProblem(
                "got attn_mask beside is_causal=True, expected one of them, as of torch's function."
            )
        mask = Dense(attn_mask)
    elif attn_mask is not None:
        bias = DenseBias(attn_mask)
    if not return_lse:
        return attention(query, key, value, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)
    out, lse = attention(
        query, key, value, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p, return_lse=True
    )
    return out, lse.transpose(1, 2)
