"""The answer to calls without batch, queries, heads or keys, which no kernel needs to be asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.masks.biases import Bias
from polyattn.torch.kit.layouts import from_bnth, lse_from_bnt, to_bnth

__all__ = ["answer_empty"]


def answer_empty(
    layout: str,
    return_lse: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    bias: Bias | None = None,
) -> Any:
    """Return zeros and the lse of empty rows.

    Both know every input, so that each has a gradient: 0, but for the sinks in the lse of rows
    without keys.
    """
    q4, v4 = to_bnth(q, layout), to_bnth(v, layout)
    nothing = _nothing_of(q, k, v, sinks, None if bias is None else bias.payload)
    out = from_bnth(q4.new_zeros((*q4.shape[:3], v4.shape[3])), layout)
    out = out if nothing is None else out + nothing
    if not return_lse:
        return out
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.full(q4.shape[:3], float("-inf"), dtype=wide, device=q.device)
    if sinks is not None:
        each = sinks.to(wide).reshape(1, sinks.shape[0], -1).logsumexp(-1)[..., None]
        lse = each.expand(q4.shape[:3]).clone()
    lse = lse_from_bnt(lse, layout)
    return out, lse if nothing is None else lse + nothing


def _nothing_of(*arrays: Tensor | None) -> Tensor | None:
    """Return a 0 that depends on all arrays, whatever they hold; None where nothing is to learn."""
    if not torch.is_grad_enabled():
        return None
    # a sum of no entries; of no dims, so that it does not change the dtype of what it is added to
    sums = [x.reshape(-1)[:0].sum() for x in arrays if x is not None]
    return torch.stack([x.to(sums[0].dtype) for x in sums]).sum()
