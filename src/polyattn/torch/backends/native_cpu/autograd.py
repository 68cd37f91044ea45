"""Derivatives in eager code: the two calls as one differentiable function, and the operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.torch.backends.native_cpu.calls import Constants, Extras, Needs, backward, forward
from polyattn.torch.backends.native_cpu.operator import (
    native_attention,
    native_attention_backward,
    raise_second_derivative,
)

__all__ = ["attend", "transform"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, constants: Constants
) -> tuple[Tensor, Tensor]:
    """Return out and lse, both differentiable once, by q, k, v, the bias and the sinks."""
    bias, slopes, sinks, codes, arrays = extras
    return _Attention.apply(q, k, v, bias, sinks, slopes, codes, constants, *arrays)  # type: ignore[no-any-return, no-untyped-call]


class _Attention(torch.autograd.Function):
    """`forward` saves the inputs and both results; `backward` computes the tiles again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None,
        slopes: Tensor | None, codes: Any, constants: Constants, *arrays: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
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
        if torch.is_grad_enabled():  # create_graph=True: the operator refuses second derivatives
            each: tuple[Tensor | None, ...] = native_attention_backward(
                dout, dlse, q, k, v, out, lse, bias, slopes, sinks, list(codes), arrays,
                *constants, wanted[3], wanted[4],
            )  # fmt: skip
        else:
            extras, needs = Extras(bias, slopes, sinks, codes, arrays), Needs(wanted[3], wanted[4])
            each = backward(dout, dlse, q, k, v, out, lse, extras, constants, needs)
        given = [grad if need else None for grad, need in zip(each, wanted, strict=True)]
        return (*given, None, None, None, *(None for _ in arrays))


def transform(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, constants: Constants
) -> tuple[Tensor, Tensor]:
    """Return out and lse under function transforms (vmap, grad, vjp and their compositions).

    Forward-mode derivatives raise torch's own error for functions that have none.
    """
    bias, slopes, sinks, codes, arrays = extras
    return _Transformed.apply(  # type: ignore[no-any-return, no-untyped-call]
        q, k, v, bias, sinks, slopes, tuple(codes), constants, *arrays
    )


class _Transformed(torch.autograd.Function):
    """The operators as a function that functorch can take apart level by level."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None,
        slopes: Tensor | None, codes: Any, constants: Any, *arrays: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return native_attention(
            q, k, v, bias, slopes, sinks, list(codes), list(arrays), *constants, True
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, bias, sinks, slopes, codes, constants, *arrays = inputs
        ctx.save_for_backward(q, k, v, *output, bias, sinks, slopes, *arrays)
        ctx.codes, ctx.constants = codes, constants

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, bias, sinks, slopes, *arrays = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:5]
        each = _TransformedBackward.apply(  # type: ignore[no-untyped-call]
            dout, dlse, q, k, v, out, lse, bias, slopes, sinks, ctx.codes, ctx.constants,
            wanted[3], wanted[4], *arrays,
        )  # fmt: skip
        given = [grad if need else None for grad, need in zip(each, wanted, strict=True)]
        return (*given, None, None, None, *(None for _ in arrays))


class _TransformedBackward(torch.autograd.Function):
    """The backward operator for functorch, which keeps the graph of every backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        *tensors, codes, constants, wants_dbias, wants_dsinks = args[:14]
        return native_attention_backward(
            *tensors, list(codes), list(args[14:]), *constants, wants_dbias, wants_dsinks
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept: there are no second derivatives."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise_second_derivative()
