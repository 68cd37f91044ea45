"""diffusers' context parallelism around polyattn's kernels: its ring and its Ulysses.

The library's templates move tensors between ranks and call two functions: what attends here, and
what gives the gradients. A ring merges what its ranks computed by their log-sum-exp, so that each
step's gradients follow from the merged ones; with `w = exp(lse_step - lse)`:

    grad_out_step = w * grad_out
    grad_lse_step = w * sum(grad_out * (out_step - out))

and the rest is the kernel's own backward, that of the log-sum-exp included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.errors import Unsupported
from polyattn.integrations.diffusers.library import library
from polyattn.integrations.diffusers.on_this_rank import attend, over_four_dims

__all__ = ["attend_over_ranks"]


def attend_over_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    parallel_config: Any,
) -> Any:
    """Hand the call to the template that the configuration asks for."""
    over = parallel_config.context_parallel_config
    if over.ring_degree > 1 and attn_mask is not None:
        raise Unsupported(
            "got an attn_mask under ring attention, whose template shows each rank's keys the same "
            "mask; expected none, or ulysses_degree in place of ring_degree."
        )
    if dropout_p > 0.0:
        raise Unsupported(
            f"got dropout_p={dropout_p} under context parallelism, whose backward computes the "
            "probabilities again; expected 0."
        )
    return library().templated(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse,
        forward_op=_forward, backward_op=_backward, _parallel_config=parallel_config,
    )  # fmt: skip


def _forward(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> Any:
    attn_mask = over_four_dims(attn_mask, query, key)
    if _save_ctx:
        ctx.save_for_backward(query, key, value)
        ctx.polyattn_call = attn_mask, is_causal, scale
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, return_lse)


def _backward(
    ctx: Any,
    grad_out: Tensor,
    *args: Any,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value; `out` and `lse` are the merged ones."""
    saved = ctx.saved_tensors
    given = (query, key, value)
    arrays = [
        (held if one is None else one).detach().requires_grad_()
        for held, one in zip(saved, given, strict=True)
    ]
    attn_mask, is_causal, scale = ctx.polyattn_call
    with torch.enable_grad():
        q, k, v = arrays
        step = attend(q, k, v, attn_mask, 0.0, is_causal, scale, out is not None)
    if out is None or lse is None:
        return torch.autograd.grad(step, arrays, grad_out.to(step.dtype))
    out_step, lse_step = step
    weight = torch.exp(lse_step.detach() - lse).unsqueeze(-1)
    wide = grad_out.to(weight.dtype)
    grad_lse = (weight * wide * (out_step.detach() - out)).sum(-1)
    grads = ((weight * wide).to(out_step.dtype), grad_lse.to(lse_step.dtype))
    return torch.autograd.grad((out_step, lse_step), arrays, grads)
