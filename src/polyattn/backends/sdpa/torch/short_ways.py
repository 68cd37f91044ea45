"""The short ways to the CPU flash kernel: calls so common that a frame too many is felt.

What they find to be unusual, by a NaN in the output, goes the careful way of `lowering`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.backends.sdpa.torch.operators import FEW_KEYS
from polyattn.errors import MissingDependency
from polyattn.native.module import load
from polyattn.problem import Problem
from polyattn.torch.internals import (
    are_transforms_active,
    dispatch_modes,
    may_be_traced_before_autograd,
    tracing_state,
)
from polyattn.torch.kit.masking import four_dims
from polyattn.torch.kit.nan_isolation import holds_nan, is_readable

__all__ = [
    "EXCHANGE",
    "biased_flash_cpu",
    "causal_flash_cpu",
    "dense_flash_cpu",
    "is_biased",
    "is_dense",
    "is_plain",
    "is_square_causal",
    "plain_flash_cpu",
    "takes_flag",
    "traced_flash_cpu",
]

_WATCHERS = are_transforms_active, dispatch_modes, may_be_traced_before_autograd, tracing_state
EXCHANGE: Any = getattr(Tensor, "__dlpack_c_exchange_api__", None)
"""How C reads a tensor without a Python call."""


def is_plain(p: Problem) -> bool:
    """Say whether it is q, k and v alone, but for a mask."""
    return (
        p.bias is None
        and not p.sinks
        and not p.lse
        and p.contiguous
        and not p.gqa
        and p.layout != "packed"
    )


def is_square_causal(p: Problem) -> bool:
    """Say whether the mask is the one that the causal flag means."""
    causal = p.mask is not None and p.mask.is_causal("top_left") and p.q_len == p.kv_len
    return causal and takes_flag(p)


def takes_flag(p: Problem) -> bool:
    """Say whether the causal flag may be used: kernels scale its -inf, so 0 gives NaN, -1 +inf."""
    return p.scale is None or p.scale > 0


def causal_flash_cpu(
    function: Any, problem: Problem, careful: Callable[..., Any]
) -> Callable[..., Any]:
    """The short way for causal calls; a NaN in the output sends the call the careful way."""
    turned, scale, grad = problem.layout == "BTNH", problem.scale, problem.grad
    small = problem.batch * problem.heads * problem.q_len * problem.head_dim <= 1 << 12
    zeros = _zeros_for(problem) if problem.kv_len < FEW_KEYS else None
    functorch, modes, _, tracing = _WATCHERS  # in cells: quicker than globals

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        q4, k4, v4 = q, k, v
        if turned:
            q4, k4, v4 = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if zeros is not None:
            out = function(q4, k4, v4, 0.0, True, attn_mask=zeros(k4), scale=scale)[0]
        else:
            out = function(q4, k4, v4, 0.0, True, scale=scale)[0]
        plain = type(out) is Tensor and not functorch() and tracing() is None
        if plain and (not modes() or is_readable(out)):
            # the last row sees every key: it tells whether there is a NaN among them
            last = out if small else out[:, :, -1]
            try:
                total = (last.detach() if grad else last).sum().item()
            except RuntimeError:  # traced before autograd, which `modes` does not count
                if is_readable(out):
                    raise
                total = 0.0
            if total != total:
                return careful(q, k, v, mask, bias, sinks)
        return out.transpose(1, 2) if turned else out

    return kernel


def is_dense(p: Problem) -> bool:
    """Say whether the mask is one boolean array, in inference."""
    return p.mask is not None and p.mask.kinds == {"Dense"} and not p.grad


def dense_flash_cpu(
    function: Any, problem: Problem, careful: Callable[..., Any]
) -> Callable[..., Any]:
    """The short way for one boolean mask in inference; a NaN sends the call the careful way."""
    turned, scale, wide = problem.layout == "BTNH", problem.scale, _added_in(problem)
    functorch, modes, _, tracing = _WATCHERS

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        allowed = four_dims(mask.mask)
        q4, k4, v4 = (x.transpose(1, 2) for x in (q, k, v)) if turned else (q, k, v)
        watched = functorch() or modes() or tracing() is not None
        if watched or allowed.shape[-1] != k4.shape[2] or type(q) is not Tensor:
            return careful(q, k, v, mask, bias, sinks)
        added = torch.where(allowed, 0.0, float("-inf"))
        if added.dtype != wide:
            added = added.to(wide)
        out = function(q4, k4, v4, 0.0, False, attn_mask=added, scale=scale)[0]
        try:
            struck = holds_nan(out, True)
        except RuntimeError:  # traced before autograd: the careful way knows
            struck = True
        if struck:
            return careful(q, k, v, mask, bias, sinks)
        return out.transpose(1, 2) if turned else out

    return kernel


def is_biased(p: Problem) -> bool:
    """Say whether it is q, k, v and one dense bias, in inference."""
    biased = (
        p.mask is None and p.bias_structure is not None and p.bias_structure.kind == "DenseBias"
    )
    alone = not (p.sinks or p.lse or p.grad or p.bias_grad or p.gqa)
    return biased and alone and p.contiguous and p.layout != "packed" and not p.compiled


def biased_flash_cpu(
    function: Any, problem: Problem, careful: Callable[..., Any]
) -> Callable[..., Any]:
    """The short way for one dense bias in inference."""
    turned, scale, wide = problem.layout == "BTNH", problem.scale, _added_in(problem)
    functorch, modes, _, tracing = _WATCHERS

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        added = bias.payload
        if type(added) is not Tensor or functorch() or modes() or tracing() is not None:
            return careful(q, k, v, mask, bias, sinks)
        added = four_dims(added)
        if added.dtype != wide:
            added = added.to(wide)
        if added.shape[-1] == 1:
            added = added.expand(-1, -1, -1, k.shape[1 if turned else 2])
        if turned:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = function(q, k, v, 0.0, False, attn_mask=added, scale=scale)[0]
        return out.transpose(1, 2) if turned else out

    return kernel


def plain_flash_cpu(function: Any, problem: Problem) -> Callable[..., Any]:
    """The shortest way to the CPU kernel, for calls without mask: no more than torch's own."""
    if problem.kv_len < FEW_KEYS:
        return _few_keys_flash_cpu(function, problem)
    return _many_keys_flash_cpu(function, problem)


def traced_flash_cpu(function: Any, problem: Problem) -> Callable[..., Any]:
    """The shortest way in compiled code: how many keys there are is seen where it is traced.

    `kernel.operator_from`: from how many keys on it is nothing but an operator, and which.
    `kernel.for_any`: what runs any number of keys, and asks for none.
    """
    few, many = _few_keys_flash_cpu(function, problem), _many_keys_flash_cpu(function, problem)
    at, limit = (1 if problem.layout == "BTNH" else 2), FEW_KEYS

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        return few(q, k, v) if k.shape[at] < limit else many(q, k, v)

    kernel.for_any = few  # type: ignore[attr-defined]
    if hasattr(many, "operator"):
        kernel.operator_from = limit, many.operator  # type: ignore[attr-defined]
    return kernel


def _many_keys_flash_cpu(function: Any, problem: Problem) -> Callable[..., Any]:
    scale = problem.scale
    if problem.layout == "BNTH":
        if scale is None:
            bare = lambda q, k, v, mask=None, bias=None, sinks=None: function(q, k, v)[0]  # noqa: E731
            bare.operator = function  # type: ignore[attr-defined]  # kernel(q, k, v) is operator(q, k, v)[0]
            return bare
        return lambda q, k, v, mask=None, bias=None, sinks=None: function(q, k, v, scale=scale)[0]

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if scale is None:  # torch's argument parser takes 0.1 us for a keyword
            return function(q, k, v)[0].transpose(1, 2)
        return function(q, k, v, scale=scale)[0].transpose(1, 2)

    return kernel


def _few_keys_flash_cpu(function: Any, problem: Problem) -> Callable[..., Any]:
    """Give the kernel a mask of zeros, with which it keeps a NaN in every score of a row.

    Without one such a row is 0, and so is its lse (torch 2.9 to 2.15), which is quicker to look for
    where it may be read.
    """
    turned, scale, zeros = problem.layout == "BTNH", problem.scale, _zeros_for(problem)
    has_zero = None if problem.grad or problem.compiled else _finder_of_zeros()
    functorch, modes, recorded, tracing = _WATCHERS  # in cells: quicker than globals

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        if turned:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        lse = None
        if (
            has_zero is not None
            and type(q) is Tensor
            and not functorch()
            and not modes()
            and not recorded()
            and tracing() is None
        ):
            out, lse = function(q, k, v) if scale is None else function(q, k, v, scale=scale)
            lse = None if has_zero(EXCHANGE, lse) else lse
        if lse is None:
            out = function(q, k, v, 0.0, False, attn_mask=zeros(k), scale=scale)[0]
        return out.transpose(1, 2) if turned else out

    return kernel


def _finder_of_zeros() -> Callable[[Any, Tensor], bool] | None:
    """Return what says whether a tensor holds a zero, or None where it is not built."""
    if EXCHANGE is None:
        return None
    try:
        return load().has_zero  # type: ignore[no-any-return]
    except (MissingDependency, AttributeError):  # none, or one of older sources
        return None


def _zeros_for(problem: Problem) -> Callable[[Tensor], Tensor]:
    """Return what gives, for (B, N, S, H) keys, a mask that allows them, in the scores' dtype.

    Making it takes longer than using it, so there is one for all calls with plain tensors.
    """
    wide = _added_in(problem)
    kept: list[Tensor] = []
    if problem.compiled:
        return lambda k: k.new_zeros((1, 1, 1, k.shape[2]), dtype=wide)

    def zeros(k: Tensor) -> Tensor:
        if kept and type(k) is Tensor:
            return kept[0]
        if type(k) is not Tensor or _is_watched():  # it would be a part of what is traced
            return k.new_zeros((1, 1, 1, k.shape[2]), dtype=wide)
        with torch.inference_mode(False):  # to be of use in training, too
            kept[:] = [torch.zeros((1, 1, 1, k.shape[2]), dtype=wide, device=k.device)]
        return kept[0]

    return zeros


def _added_in(problem: Problem) -> torch.dtype:
    """Return the dtype of what the kernel adds to scores: that of the scores."""
    return torch.float64 if problem.dtype == "float64" else torch.float32


def _is_watched() -> bool:
    functorch, modes, recorded, tracing = _WATCHERS
    return bool(functorch() or modes() or recorded()) or tracing() is not None
