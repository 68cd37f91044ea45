"""Gradients of the CPU flash kernel in rows whose every score is as good as infinite.

The kernel makes probabilities again from scores and their lse, max + log(sum). Under a bias of
``finfo.min`` alone the log of the sum is nothing beside the maximum and is rounded away: each of
the tied keys would get the whole (torch 2.9 to 2.13). The unfused path keeps probabilities instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.backends.sdpa.torch.operators import Call, Result, unfused
from polyattn.torch.internals import are_transforms_active
from polyattn.torch.kit.nan_isolation import is_readable

__all__ = ["keeping_sums"]


def keeping_sums(flash: Call) -> Call:
    """Return the call of a kernel whose gradients are right in such rows too.

    Which rows these are is read; a call without them is `flash` alone. Transforms of `torch.func`
    cannot be read in, and run the unfused path.
    """

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        causal: bool,
        scale: Any,
        dropout: float,
        lse: bool,
    ) -> Result:
        unread = mask is not None and are_transforms_active()
        if unread and not lse:
            return _defined(q, k, v, mask, causal, scale), None
        out, sums = flash(q, k, v, mask, causal, scale, dropout, lse)
        if unread:
            return _defined(q, k, v, mask, causal, scale), sums
        if mask is None or sums is None or not out.requires_grad or not is_readable(out):
            return out, sums
        lost = _lost(sums.detach())
        if not bool(lost.any()):
            return out, sums
        whole: Tensor = _Kept.apply(q, k, v, mask, out.detach(), lost, (flash, causal, scale))
        return whole, sums

    return call


def _lost(lse: Tensor) -> Tensor:
    """Say of which rows the lse is known to 1/64 and worse, and so are the probabilities."""
    return (lse.abs() > 2.0**-6 / torch.finfo(lse.dtype).eps) & lse.isfinite()


class _Kept(torch.autograd.Function):
    """The kernel's output, whose gradient is the unfused path's if one comes in to a lost row."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        out: Tensor,
        lost: Tensor,
        rest: tuple[Call, bool, Any],
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, mask, lost)
        ctx.rest = rest
        return out.view_as(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *arrays, mask, lost = ctx.saved_tensors
        flash, causal, scale = ctx.rest
        wanted = ctx.needs_input_grad[:3]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(w) for x, w in zip(arrays, wanted, strict=True)]
            q, k, v = leaves
            if bool((dout[lost] != 0).any()):
                out = _defined(q, k, v, mask, causal, scale)
            else:
                out, _ = flash(q, k, v, mask, causal, scale, 0.0, False)
            trained = [x for x, w in zip(leaves, wanted, strict=True) if w]
            found = iter(torch.autograd.grad(out, trained, dout))
        return (*(next(found) if w else None for w in wanted), None, None, None, None)


def _defined(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool, scale: Any) -> Tensor:
    """Run the unfused path, which takes as many key heads as query heads and one kind of mask."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = mask.masked_fill(~seen, float("-inf"))
    return unfused(q, k, v, mask, False, scale, 0.0, False)[0]
