"""Attention one block of keys at a time (Milakov and Gimelshein, arXiv 1805.02867).

``m`` is the running maximum of a row, ``d`` the sum of exp(score - m), ``acc`` the weighted sum
of values; a block with a larger maximum rescales both. Letters: B batch, N heads, T queries,
S keys, H head dim, V value dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyattn.problem import Problem

BLOCK = 64


def prepare(problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the kernel for a problem; everything that does not depend on values is done here."""
    scale = problem.scale if problem.scale is not None else 1 / math.sqrt(problem.head_dim)
    mask = problem.mask
    causal = mask is not None and "Causal" in mask.kinds
    top_left = mask is not None and mask.align == "top_left"
    shift = 0 if top_left else problem.kv_len - problem.q_len
    heads_second = problem.layout == "BNTH"

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        if not heads_second:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, lse = _attend(q * scale, k, v, shift if causal else None)
        out = out if heads_second else out.transpose(1, 2)
        return (out, lse) if problem.lse else out

    return kernel


def _attend(q: Tensor, k: Tensor, v: Tensor, shift: int | None) -> tuple[Tensor, Tensor]:
    """Attend (B, N, T, H) to (B, N, S, H); query t sees keys up to t + shift, or all of them."""
    m = q.new_full((*q.shape[:3], 1), -math.inf)
    d = torch.zeros_like(m)
    acc = q.new_zeros((*q.shape[:3], v.shape[-1]))
    last = torch.arange(q.shape[2], device=q.device).unsqueeze(-1)
    for start in range(0, k.shape[2], BLOCK):
        keys, values = k[:, :, start : start + BLOCK], v[:, :, start : start + BLOCK]
        scores = q @ keys.transpose(-1, -2)
        if shift is None:
            m, d, acc = _merge(m, d, acc, scores, values)
            continue
        position = torch.arange(start, start + keys.shape[2], device=q.device)
        hidden = position > last + shift
        for row in _rows_with_keys(hidden):
            parts = _merge(
                m[:, :, row],
                d[:, :, row],
                acc[:, :, row],
                scores[:, :, row].masked_fill(hidden[row], -math.inf),
                values,
                hidden[row],
            )
            m[:, :, row], d[:, :, row], acc[:, :, row] = parts
    out = torch.where(d > 0, acc / torch.where(d > 0, d, 1), 0)
    return out, torch.where(d > 0, m + d.log(), -math.inf).squeeze(-1)


def _rows_with_keys(hidden: Tensor) -> list[slice]:
    """Return the rows that see a key of this block: those from the first one on, if any."""
    seen = (~hidden).any(-1).nonzero()
    return [slice(int(seen[0]), hidden.shape[0])] if seen.numel() else []


def _merge(
    m: Tensor, d: Tensor, acc: Tensor, scores: Tensor, values: Tensor, hidden: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one block of scores and values into the running maximum, sum and output."""
    higher = torch.maximum(m, scores.amax(-1, keepdim=True))
    weights, old = torch.exp(scores - higher), torch.exp(m - higher)
    return (
        higher,
        d * old + weights.sum(-1, keepdim=True),
        acc * old + _weigh(weights, values, hidden),
    )


def _weigh(weights: Tensor, values: Tensor, hidden: Any) -> Tensor:
    """Return weights @ values, in which a hidden value counts for nothing even if it is NaN."""
    product = weights @ values
    if hidden is None or not bool(product.isnan().any()):
        return product
    finite = weights @ torch.where(values.isfinite(), values, 0)
    bad = (~values.isfinite()).to(values.dtype)
    struck = (~hidden).to(values.dtype) @ bad > 0
    return torch.where(struck, product, finite)
