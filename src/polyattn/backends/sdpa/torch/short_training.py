"""The short way to the CPU flash kernel for calls that train, and are over in some 100 us.

Whether something could leak or get lost is asked of the inputs, before: nothing can where no float
is near infinity and each query sees a key. What is not ordinary goes the careful way of `lowering`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.backends.sdpa.torch.operators import FEW_KEYS
from polyattn.backends.sdpa.torch.short_ways import EXCHANGE, is_square_causal
from polyattn.errors import MissingDependency
from polyattn.native.module import load
from polyattn.problem import Problem
from polyattn.torch.internals import dual_levels, is_lazy_copy, tracing_state
from polyattn.torch.kit.masking import four_dims
from polyattn.torch.kit.plain_calls import ASKERS, is_plain_call

__all__ = ["trained_flash_cpu", "trains_short"]

Kernel = Callable[..., Any]

_FEW = 1 << 14  # entries of the queries, which are read in a microsecond
_DTYPES = ("float32", "bfloat16", "float16")
_UNREADABLE = ValueError, BufferError, RuntimeError


def trains_short(p: Problem) -> bool:
    """Say whether it is q, k and v alone that train, and all of them had better be looked at.

    Under one boolean mask and with grouped heads the careful way costs more. Else it looks at less
    or at nothing, and larger calls are left to it.
    """
    extra = p.bias_structure is not None or p.sinks or p.lse or p.dropout_p or p.compiled
    bare = p.grad and p.contiguous and p.layout != "packed" and not extra and p.dtype in _DTYPES
    if not bare or (p.mask is not None and p.mask.kinds == {"Dense"}):
        return bare
    few = p.gqa or p.batch * p.heads * p.q_len * p.head_dim <= _FEW
    return few and (is_square_causal(p) if p.mask is not None else p.gqa or p.kv_len < FEW_KEYS)


def trained_flash_cpu(function: Any, problem: Problem, careful: Kernel) -> Kernel:
    """Return ``kernel(q, k, v, mask, bias, sinks)``; `careful` where the extension is not built."""
    are_ordinary = _asker()
    if are_ordinary is None:
        return careful
    turned, scale = problem.layout == "BTNH", problem.scale
    dense = problem.mask is not None and problem.mask.kinds == {"Dense"}
    causal = problem.mask is not None and not dense
    made = getattr(load(), "TrainedCall", None)
    if made is not None and not dense:  # the same, with no frame of Python
        return made((  # type: ignore[no-any-return]
            function, careful, EXCHANGE, (Tensor, torch.nn.Parameter), ASKERS, tracing_state,
            dual_levels, is_lazy_copy, turned, causal, scale,
        ))  # fmt: skip

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        if not is_plain_call(q, k, v):
            return careful(q, k, v, mask, bias, sinks)
        q4, k4, v4, added = q, k, v, None
        if turned:
            q4, k4, v4 = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        try:
            allowed = four_dims(mask.mask) if dense else None
            if dense and (type(allowed) is not Tensor or allowed.shape[-1] != k4.shape[2]):
                return careful(q, k, v, mask, bias, sinks)
            ordinary = are_ordinary(EXCHANGE, q, k, v, allowed)
        except _UNREADABLE:
            ordinary = False
        if not ordinary:
            return careful(q, k, v, mask, bias, sinks)
        if allowed is not None:
            # the numbers are of torch's default dtype, the scores of float32
            added = torch.where(allowed, 0.0, float("-inf")).float()
        if added is None and scale is None:  # torch's argument parser takes 1 us for two keywords
            out = function(q4, k4, v4, 0.0, causal)[0]
        else:
            out = function(q4, k4, v4, 0.0, causal, attn_mask=added, scale=scale)[0]
        return out.transpose(1, 2) if turned else out

    return kernel


def _asker() -> Callable[..., bool] | None:
    if EXCHANGE is None:
        return None
    try:
        return load().are_ordinary  # type: ignore[no-any-return]
    except (MissingDependency, AttributeError):  # none, or one of older sources
        return None
