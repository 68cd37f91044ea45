"""Attention in operators that every exporter of torch knows, for any lengths.

Where a program is exported and torch's own function can say the call, that function stands in the
program, undecided: which of its kernels runs is for the place where it runs. All else, and every
call that is not exported, is written out: products, soft cap, masks, softmax.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyattn.backends.sdpa.declared import rounds_bias, rounds_sinks
from polyattn.backends.sdpa.torch.lowering import prepare
from polyattn.backends.sdpa.torch.operators import Call, Op, Result, beyond_autocast
from polyattn.problem import Problem
from polyattn.torch.internals import is_exported, is_exported_to_onnx

__all__ = ["load_portable"]


def load_portable() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Load what exported programs hold."""

    def make(problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
        says = problem.softcap is None and not problem.lse and not _is_rounded(problem)
        groups = problem.heads // problem.kv_heads if problem.kv_heads else 1
        call: Call = functools.partial(_written_out, problem, groups)
        if says and is_exported():
            call = functools.partial(_own_function, groups, not is_exported_to_onnx())
        op = Op(
            beyond_autocast(call),
            grouped=True,
            causal_with_mask=False,
            wide=not says,
            any_sizes=True,
            lse_trains=True,
        )
        return prepare(op, problem, config)

    return make


def _is_rounded(problem: Problem) -> bool:
    """Say whether torch's function would round what is added to the scores of half precision."""
    return rounds_bias(problem) or rounds_sinks(problem)


def _own_function(
    groups: int, grouped: bool, q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool,
    scale: Any, dropout: float, lse: bool,
) -> Result:  # fmt: skip
    """Call torch's own function; heads are repeated for exporters that know no grouped ones."""
    if groups > 1 and not grouped:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    out = torch.ops.aten.scaled_dot_product_attention(
        q, k, v, mask, dropout, causal, scale=scale, enable_gqa=groups > 1 and grouped
    )
    return out, None


def _written_out(
    problem: Problem, groups: int, q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool,
    scale: Any, dropout: float, lse: bool,
) -> Result:  # fmt: skip
    """Compute attention by its definition, in float32 at least; arrays (B, N, T, H)."""
    wide, softcap = torch.promote_types(q.dtype, torch.float32), problem.softcap
    scale = 1 / math.sqrt(problem.head_dim) if scale is None else scale
    heads = q.to(wide).unflatten(1, (-1, groups))
    keys = k.to(wide).unsqueeze(2).transpose(-1, -2)
    scores = (heads @ keys).flatten(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        t, j = (torch.arange(n, device=q.device) for n in (q.shape[2], k.shape[2]))
        scores = torch.where(t.unsqueeze(-1) >= j, scores, float("-inf"))
    if mask is not None:
        scores = scores + mask.to(wide)
    peak = scores.detach().amax(-1, keepdim=True)
    peak = torch.where(peak == float("-inf"), 0, peak)
    shares = torch.exp(scores - peak)
    total = shares.sum(-1, keepdim=True)
    weights = shares / torch.where(total == 0, 1, total)
    weights = torch.nn.functional.dropout(weights, dropout) if dropout > 0 else weights
    out = (weights.unflatten(1, (-1, groups)) @ v.to(wide).unsqueeze(2)).flatten(1, 2)
    return out.to(q.dtype), (total.log() + peak).squeeze(-1) if lse else None
