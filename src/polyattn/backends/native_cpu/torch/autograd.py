"""Derivatives in eager code: the two calls as one differentiable function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.backends.native_cpu.torch.calls import Constants, Extras, Needs, forward
from polyattn.backends.native_cpu.torch.gradients import gradients
from polyattn.backends.native_cpu.torch.levels import PLAIN, is_batched
from polyattn.backends.native_cpu.torch.operator import native_attention_backward
from polyattn.torch.internals import is_watched

__all__ = ["attend"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, constants: Constants
) -> tuple[Tensor, Tensor]:
    """Return out and lse of plain tensors, both differentiable by q, k, v, the bias and the sinks.

    First derivatives run the backward kernel; where they are differentiated again, batched or
    watched, they go through its operator, which can do all of that.
    """
    bias, slopes, sinks, codes, arrays = extras
    return _Attention.apply(q, k, v, bias, sinks, slopes, codes, constants, *arrays)  # type: ignore[no-any-return, no-untyped-call]


class _Attention(torch.autograd.Function):
    """`forward` saves the inputs and both results; `backward` computes the tiles again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        slopes: Tensor | None,
        codes: Any,
        constants: Constants,
        *arrays: Tensor,
    ) -> tuple[Tensor, Tensor]:
        extras = Extras(bias, slopes, sinks, codes, arrays)
        out, lse = forward(q, k, v, extras, constants, True)
        assert lse is not None  # asked for
        ctx.save_for_backward(q, k, v, out, lse, bias, sinks, slopes, *arrays)
        ctx.codes, ctx.constants = codes, constants
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, bias, sinks, slopes, *arrays = ctx.saved_tensors
        wanted, codes, constants = ctx.needs_input_grad[:5], ctx.codes, ctx.constants
        if dout is None and dlse is None:
            return (None,) * (8 + len(arrays))
        if torch.is_grad_enabled() or is_watched() or not (_is_plain(dout) and _is_plain(dlse)):
            each: tuple[Tensor | None, ...] = native_attention_backward(
                dout, dlse, q, k, v, out, lse, bias, slopes, sinks, list(codes), arrays,
                *constants, wanted[3], wanted[4],
            )  # fmt: skip
        else:
            extras, needs = Extras(bias, slopes, sinks, codes, arrays), Needs(wanted[3], wanted[4])
            each = gradients(dout, dlse, q, k, v, out, lse, extras, constants, needs)
        given = [grad if need else None for grad, need in zip(each, wanted, strict=True)]
        return (*given, None, None, None, *(None for _ in arrays))


def _is_plain(x: Tensor | None) -> bool:
    """Say whether a gradient has a storage of its own: those of vmaps look like plain tensors."""
    return x is None or (type(x) in PLAIN and not is_batched(x))
