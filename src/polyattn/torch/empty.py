"""The answer to calls without batch, queries, heads or keys, which no kernel needs to be asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.torch.layouts import from_bnth, lse_from_bnt, to_bnth

__all__ = ["answer_empty"]


def answer_empty(
    layout: str, return_lse: bool, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> Any:
    """Return zeros and the lse of empty rows; gradients are zeros, too."""
    q4, v4 = to_bnth(q, layout), to_bnth(v, layout)
    out = q4.new_zeros((*q4.shape[:3], v4.shape[3]))
    if torch.is_grad_enabled():
        for x in (q, k, v):  # so that a backward finds its way, with gradients of zero
            out = out + x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0).sum()
    out = from_bnth(out, layout)
    if not return_lse:
        return out
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.full(q4.shape[:3], float("-inf"), dtype=wide, device=q.device)
    if sinks is not None:
        each = sinks.to(wide).reshape(1, sinks.shape[0], -1).logsumexp(-1)[..., None]
        lse = each.expand(q4.shape[:3]).clone()
    return out, lse_from_bnt(lse, layout)
