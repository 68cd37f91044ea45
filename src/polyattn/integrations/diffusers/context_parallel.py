"""diffusers' context parallelism around polyattn's kernels: its ring and its Ulysses.

The library's templates move tensors between ranks and call two functions: what attends here, and
what gives the gradients. A ring merges what its ranks computed by their log-sum-exp, so that each
step's gradients follow from the merged ones; with `w = exp(lse_step - lse)`:

    grad_out_step = w * grad_out
    grad_lse_step = w * sum(grad_out * (out_step - out))

and the rest is the kernel's own backward, that of the log-sum-exp included.

From three ranks on the ring's template hands gradients of keys on in the wrong direction, so that
they come home to other keys. Those are computed here then (`ring_gradients`), and the template is
given all of them in its first step and zeros after that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import Unsupported
from polyattn.integrations.diffusers.library import library, ring_group
from polyattn.integrations.diffusers.on_this_rank import attend, over_four_dims
from polyattn.integrations.diffusers.ring_gradients import ring_gradients
from polyattn.selection import scopes

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
    grouped = enable_gqa and key.shape[2] != query.shape[2]
    _check(query, attn_mask, dropout_p, is_causal, grouped, over)
    found = library().templated(
        query, key, value, attn_mask, dropout_p, is_causal, scale, grouped, return_lse,
        forward_op=_forward, backward_op=_backward, _parallel_config=parallel_config,
    )  # fmt: skip
    if return_lse and found[1].requires_grad:
        return found[0], _WithoutGradient.apply(found[1])
    return found


def _check(
    query: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    grouped: bool,
    over: Any,
) -> None:
    """Raise for what the templates would get wrong, drop, or refuse in words of their own."""
    wrong = None
    if over.ring_degree > 1 and attn_mask is not None:
        wrong = (
            "got an attn_mask under ring attention, whose template shows each rank's keys the same "
            "mask; expected none, or ulysses_degree in place of ring_degree."
        )
    elif dropout_p > 0.0:
        wrong = (
            f"got dropout_p={dropout_p} under context parallelism, whose backward computes the "
            "probabilities again; expected 0."
        )
    elif is_causal or grouped:
        what = "is_causal=True" if is_causal else "fewer key than query heads (enable_gqa=True)"
        instead = "an attn_mask under ulysses_degree" if is_causal else "key heads repeated"
        wrong = (
            f"got {what} under context parallelism, whose templates do not know it; expected "
            f"{instead}, or no context parallelism."
        )
    elif attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled():
        wrong = (
            "got an attn_mask that wants a gradient under context parallelism, whose templates "
            "give it none; expected one that needs none: attn_mask.detach()."
        )
    wrong = wrong or _of_heads(query, attn_mask, over)
    if wrong:
        raise Unsupported(wrong)


def _of_heads(query: Tensor, attn_mask: Tensor | None, over: Any) -> str | None:
    """Say what is wrong with heads that Ulysses cannot share out."""
    heads, ranks = query.shape[2], over.ulysses_degree
    if ranks > 1 and heads % ranks and not getattr(over, "ulysses_anything", False):
        return (
            f"got {heads} heads under ulysses_degree={ranks}, expected a multiple of {ranks}: each "
            "rank has as many heads as the others. Use ring_degree, or ulysses_anything=True to "
            "run forward alone."
        )
    rows = attn_mask.shape if ranks > 1 and attn_mask is not None else ()
    if len(rows) == 4 and rows[1] not in (1, -(-heads // ranks)):
        return (
            f"got an attn_mask of {rows[1]} heads under ulysses_degree={ranks}, expected "
            "one for all heads (1 in dim 1): the template hands each rank the whole mask beside "
            "heads of its own."
        )
    return None


class _WithoutGradient(torch.autograd.Function):
    """A log-sum-exp whose gradient the templates would leave out without a word."""

    @staticmethod
    def forward(ctx: Any, lse: Tensor) -> Tensor:
        return lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise Unsupported(
            "got a gradient of the log-sum-exp under context parallelism, whose templates do not "
            "hand it on; expected one of the output alone: lse.detach()."
        )


@contextmanager
def _asked(scope: str | None, module: str | None) -> Iterator[None]:
    """Have that asked for which the forward pass was, whatever is around its backward pass."""
    if (scope, module) == (scopes.current_scope(), scopes.local.module):
        yield
        return
    outer, owner = scopes.local.module, object()
    before = scopes.enter(scope or "", owner)
    try:
        scopes.local.module = module
        yield
    finally:
        scopes.local.module = outer
        scopes.leave(before, owner)


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
        ctx.polyattn_asked = scopes.current_scope(), scopes.local.module
        ctx.polyattn_over = getattr(_parallel_config, "context_parallel_config", None)
        ctx.polyattn_step = 0
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
    if torch.is_grad_enabled():
        raise Unsupported(
            "got a gradient of a gradient (create_graph=True) under context parallelism, whose "
            "backward pass cannot be differentiated; expected first derivatives, or no context "
            "parallelism."
        )
    ring = ctx.polyattn_over.ring_degree if ctx.polyattn_over is not None else 1
    if ring > 1 and lse is None:
        raise Unsupported(
            "got gradients under a ring of a diffusers whose template does not hand on the keys "
            "that have come; expected a newer one (0.42 does), or ulysses_degree."
        )
    given = [query, key, value]
    if any(one is None for one in given):  # once: checkpointing hands saved tensors out no second
        given = [x if one is None else one for x, one in zip(ctx.saved_tensors, given, strict=True)]
    q, k, v = (one for one in given if one is not None)
    if ring > 2:
        return _around_ring(ctx, grad_out, (q, k, v), out, lse)
    return _of_step(ctx, grad_out, q, k, v, out, lse)


def _around_ring(
    ctx: Any,
    grad_out: Tensor,
    arrays: tuple[Tensor, Tensor, Tensor],
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return all gradients in the first of the template's steps, zeros in the others."""
    over, step = ctx.polyattn_over, ctx.polyattn_step
    if step:
        ctx.polyattn_step = (step + 1) % over.ring_degree
        return (grad_out.new_zeros(()),) * 3

    def of_keys(key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return _of_step(ctx, grad_out, arrays[0], key, value, out, lse)

    found = ring_gradients(of_keys, *arrays, ring_group(over))
    ctx.polyattn_step = 1  # now, so that a pass that failed begins anew
    return found


def _of_step(
    ctx: Any,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the gradients that come of these keys alone."""
    arrays = [one.detach().requires_grad_() for one in (query, key, value)]
    attn_mask, is_causal, scale = ctx.polyattn_call
    with torch.enable_grad(), _asked(*ctx.polyattn_asked):
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
