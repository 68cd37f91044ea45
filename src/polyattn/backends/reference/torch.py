"""The definition of attention, in float64: what every other backend is measured against.

    s = scale * (q . k);  s = cap * tanh(s / cap);  s = s + bias;  s = -inf where masked
    lse = log(sum_j exp(s_j) + sum_m exp(sink_m));  out = sum_j exp(s_j - lse) v_j

It materialises the (B, N, T, S) scores. A NaN or an infinity reaches exactly the rows that
attend to it, in outputs and in gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import InvalidProblem
from polyattn.problem import Problem
from polyattn.torch.kit.layouts import from_bnth, lse_from_bnt, to_bnth
from polyattn.torch.kit.masking import Dims, dense_bias, visible
from polyattn.torch.kit.nonfinite import spread_values
from polyattn.torch.kit.quantised import dequantised

__all__ = ["load", "reference_attention"]


def load() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Return `prepare`, as :class:`polyattn.registry.Backend` describes it."""
    return _prepare


def _prepare(problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
    if problem.paged is not None:
        return _paged_kernel(problem)
    if problem.quantized is not None:
        return _quantized_kernel(problem)
    return _plain_kernel(problem)


def _plain_kernel(problem: Problem) -> Callable[..., Any]:
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        out, lse = reference_attention(problem, q, k, v, mask, bias, sinks)
        out = out.to(q.dtype)
        if not problem.lse:
            return out
        return out, lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)

    return kernel


def _quantized_kernel(problem: Problem) -> Callable[..., Any]:
    """Attend to what the codes stand for."""
    plain = _plain_kernel(problem)

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        bias: Any,
        sinks: Any,
        quantised: tuple[Tensor, Tensor, int],
    ) -> Any:
        *scales, block_size = quantised
        keys, values = (
            dequantised(x, each, block_size, problem.layout, torch.float64)
            for x, each in zip((k, v), scales, strict=True)
        )
        return plain(q, keys, values, mask, bias, sinks)

    return kernel


def _paged_kernel(problem: Problem) -> Callable[..., Any]:
    """Gather the keys of each sequence, which is then a problem of its own."""

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        bias: Any,
        sinks: Any,
        pages: tuple[Tensor, Tensor],
    ) -> Any:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        # the rows of no sequence come first: there may be no others
        outs = [q.new_empty((0, *q.shape[1:-1], problem.value_dim))]
        sums = [q.new_empty((0, problem.heads, problem.q_len), dtype=wide)]
        for b, length in enumerate(pages[1].tolist()):
            keys, values = (_gathered(x, pages[0][b], length, problem) for x in (k, v))
            out, lse = reference_attention(
                problem.with_(batch=1, kv_len=length), q[b : b + 1], keys, values, mask, None, sinks
            )
            outs.append(out.to(q.dtype))
            sums.append(lse.to(wide))
        return (torch.cat(outs), torch.cat(sums)) if problem.lse else torch.cat(outs)

    return kernel


def _gathered(pages: Tensor, table: Tensor, length: int, problem: Problem) -> Tensor:
    """Return the first `length` keys or values of a sequence, (1, S, K, H) in the layout."""
    used = table[: -(-length // (problem.paged or 1))].long()
    if bool(((used < 0) | (used >= pages.shape[0])).any()):
        raise InvalidProblem(
            f"got a block table that does not fit {pages.shape[0]} pages: it holds "
            f"{used.tolist()[:8]}, expected 0 to {pages.shape[0] - 1}."
        )
    found = pages[used]
    if problem.layout == "BTNH":
        return found.flatten(0, 1)[None, :length]
    return found.transpose(0, 1).flatten(1, 2)[None, :, :length]


def reference_attention(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    bias: Any = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Compute attention by its definition, in `dtype`; arrays in the problem's layout.

    Returns out in the layout and lse (B, N, T), both in `dtype`. With ``torch.float32`` or less
    it is the honest baseline that tolerances are taken from.
    """
    q, k, v = (to_bnth(x, problem.layout).to(dtype) for x in (q, k, v))
    dims = Dims.of(q, k)
    shape, k_len, groups = q.shape[:3], dims.kv_len, dims.heads // max(dims.kv_heads, 1)
    allowed = torch.ones((1, 1, 1, k_len), dtype=torch.bool, device=q.device)
    if mask is not None:
        allowed = visible(mask, dims, q.device).mask
    bad_q, bad_k = (~x.isfinite().all(-1) for x in (q, k))
    bad_v = v
    q, k, v = (torch.where(x.isfinite(), x, 0) for x in (q, k, v))
    scores = _scores(problem, q, k, groups, None if mask is None else allowed)
    if bias is not None:
        scores = scores + dense_bias(bias, dims, dtype)
    poisoned = bad_q.unsqueeze(-1) | bad_k.repeat_interleave(groups, 1).unsqueeze(-2)
    scores = torch.where(poisoned, float("nan"), scores)
    scores = torch.where(allowed, scores, float("-inf"))
    weights, lse = _softmax(scores, sinks, dtype, shape)
    weights = torch.where(allowed, weights, 0)  # where all of a row is NaN, so are these
    if problem.dropout_p > 0:
        weights = torch.nn.functional.dropout(weights, problem.dropout_p)
    grouped = weights.unflatten(1, (-1, groups)) if groups else weights.unsqueeze(2)
    out = (grouped @ v.unsqueeze(2)).flatten(1, 2)
    out = spread_values(out, bad_v, allowed.expand(*shape, k_len), groups)
    return from_bnth(out, problem.layout), lse_from_bnt(lse, problem.layout)


def _scores(problem: Problem, q: Tensor, k: Tensor, groups: int, allowed: Tensor | None) -> Tensor:
    scale = problem.scale if problem.scale is not None else 1 / math.sqrt(problem.head_dim)
    scores = (q.unflatten(1, (-1, groups)) @ k.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scale
    if problem.softcap is not None:
        if allowed is not None:  # huge keys that nobody sees overflow, and tanh's gradient is NaN
            scores = torch.where(allowed, scores, 0)
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    return scores


def _softmax(
    scores: Tensor, sinks: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return the weights and the lse; rows without keys have weights 0, lse -inf or the sinks'."""
    whole = scores
    if sinks is not None:
        logits = sinks.to(dtype).reshape(1, shape[1], 1, -1)
        whole = torch.cat([scores, logits.expand(shape[0], -1, shape[2], -1)], -1)
    if whole.shape[-1] == 0:
        return scores, torch.full(shape, float("-inf"), dtype=dtype, device=scores.device)
    peak = whole.detach().amax(-1, keepdim=True)
    peak = torch.where(peak == float("-inf"), 0, peak)
    total = torch.exp(whole - peak).sum(-1, keepdim=True)
    nothing = total == 0
    total = torch.where(nothing, 1, total)
    lse = torch.where(nothing, float("-inf"), total.log() + peak)
    return torch.exp(scores - peak) / total, lse.squeeze(-1)
