"""Derivatives and batching of the two operators, in every mode that torch has.

First derivatives in reverse mode come from the backward kernel, called by its operator. Beyond
that (forward mode, derivatives of gradients) the definition is computed in plain operations,
which torch differentiates by itself, to any order (see `definition`).

The operators are differentiated as torch's own are: at the Autograd key, one level of function
transforms at a time. That works in eager code, under ``torch.func``, and where compilers trace
either. ``torch.library.register_autograd`` does not reach function transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.backends.native_cpu.torch.calls import Constants, Extras, Needs
from polyattn.backends.native_cpu.torch.definition import (
    Directions,
    defined_attention,
    defined_gradients,
    defined_second_gradients,
)
from polyattn.backends.native_cpu.torch.levels import is_batched, moves, trains
from polyattn.backends.native_cpu.torch.operator import (
    native_attention,
    native_attention_backward,
    nothing,
)
from polyattn.torch.internals import (
    OneLevelFunction,
    apply_here,
    below,
    below_function,
    legacy_batch_apart,
    legacy_batch_together,
)

__all__ = ["batched", "mapped"]


class _Attention(OneLevelFunction):
    """The forward operator at one level; its lse is always computed, and kept."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *args: Any) -> tuple[Tensor, Tensor]:
        q, k, v, bias, slopes, sinks, codes, arrays, layout, scale, softcap, wants_lse = args
        out, lse = below_function(native_attention, keys, *args[:-1], True)
        ctx.save_for_backward(q, k, v, out, lse, bias, slopes, sinks, *arrays)
        ctx.codes, ctx.constants, ctx.has_lse = codes, (layout, scale, softcap), wants_lse
        ctx.set_materialize_grads(False)
        return out, lse if wants_lse else nothing(q)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        dlse = dlse if ctx.has_lse else None
        if dout is None and dlse is None:
            return (None,) * 13
        q, k, v, out, lse, bias, slopes, sinks, *arrays = ctx.saved_tensors
        wanted = [bool(need) for need in ctx.needs_input_grad[1:7]]
        if wanted[4]:
            raise RuntimeError(
                "got slopes that need a gradient in polyattn::native_attention, expected slopes "
                "without; pass them as a dense bias to train them."
            )
        dq, dk, dv, dbias, dsinks = native_attention_backward(
            dout, dlse, q, k, v, out, lse, bias, slopes, sinks, ctx.codes, arrays,
            *ctx.constants, wanted[3], wanted[5],
        )  # fmt: skip
        each = dq, dk, dv, dbias, None, dsinks
        given = (grad if need else None for grad, need in zip(each, wanted, strict=True))
        return None, *given, *(None,) * 6


class _Gradients(OneLevelFunction):
    """The backward operator at one level; out and lse are what q, k and v make them."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *args: Any) -> tuple[Tensor, ...]:
        dout, dlse, q, k, v, _, _, bias, slopes, sinks, codes, arrays, *constants = args
        ctx.save_for_backward(dout, dlse, q, k, v, bias, slopes, sinks, *arrays)
        ctx.codes, ctx.constants = codes, Constants(*constants[:3])
        ctx.set_materialize_grads(False)
        return below_function(native_attention_backward, keys, *args)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *along: Tensor | None) -> tuple[Any, ...]:
        if all(direction is None for direction in along):
            return (None,) * 18
        dout, dlse, q, k, v, bias, slopes, sinks, *arrays = ctx.saved_tensors
        extras, wanted = Extras(bias, slopes, sinks, ctx.codes, arrays), ctx.needs_input_grad[1:]
        second = defined_second_gradients(
            Directions(*along), dout, dlse, q, k, v, extras, ctx.constants
        )
        each = *second[:5], None, None, second.bias, None, second.sinks
        given = (grad if need else None for grad, need in zip(each, wanted[:10], strict=True))
        return None, *given, *(None,) * 7


def _defined_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    codes: Sequence[int],
    arrays: Sequence[Tensor],
    layout: str,
    scale: float,
    softcap: float,
    wants_lse: bool,
) -> tuple[Tensor, Tensor]:
    """The forward operator by the definition."""
    extras = Extras(bias, slopes, sinks, codes, arrays)
    out, lse = defined_attention(q, k, v, extras, Constants(layout, scale, softcap))
    return out, lse if wants_lse else nothing(q)


def _defined_gradients(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    codes: Sequence[int],
    arrays: Sequence[Tensor],
    layout: str,
    scale: float,
    softcap: float,
    wants_dbias: bool,
    wants_dsinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The backward operator by the definition."""
    extras = Extras(bias, slopes, sinks, codes, arrays)
    constants, needs = Constants(layout, scale, softcap), Needs(wants_dbias, wants_dsinks)
    dq, dk, dv, dbias, dsinks = defined_gradients(dout, dlse, q, k, v, extras, constants, needs)
    return (
        dq,
        dk,
        dv,
        nothing(q) if dbias is None else dbias,
        nothing(q) if dsinks is None else dsinks,
    )


def _differentiated(
    operator: Any, function: Any, defined: Callable[..., Any]
) -> Callable[..., Any]:
    """Return what an operator does at the Autograd key."""

    def kernel(keys: Any, *args: Any) -> Any:
        if moves(args):
            return defined(*args)
        if trains(args):
            return apply_here(function, keys, *args)
        return below(operator, keys, *args)

    return kernel


def mapped(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Return the rule of vmap for an operator: one call for each entry of the mapped dim."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        results = [
            function(*(_entry(x, dim, i) for x, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


def _entry(x: Any, dim: Any, i: int) -> Any:
    if isinstance(x, (list, tuple)) and isinstance(dim, (list, tuple)):
        return [_entry(y, d, i) for y, d in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, i)


def batched(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Return the same for ``torch.autograd.grad(is_grads_batched=True)``, whose vmap is another."""

    def kernel(*args: Any) -> Any:
        apart = [legacy_batch_apart(x) if is_batched(x) else None for x in args]
        size = max(len(x) for x in apart if x is not None)
        results = [
            function(
                *(
                    # one entry only: mapped by an outer level
                    x if entries is None else entries[min(i, len(entries) - 1)]
                    for x, entries in zip(args, apart, strict=True)
                )
            )
            for i in range(size)
        ]
        together = zip(*results, strict=True)
        return tuple(legacy_batch_together(torch.stack(parts)) for parts in together)

    return kernel


_library = torch.library.Library("polyattn", "FRAGMENT")
for _operator, _function, _defined in (
    (native_attention, _Attention, _defined_attention),
    (native_attention_backward, _Gradients, _defined_gradients),
):
    _name = _operator.name()  # type: ignore[union-attr]
    _library.impl(
        _name, _differentiated(_operator, _function, _defined), "Autograd", with_keyset=True
    )
    _library.impl(_name, batched(_operator), "Batched")
    torch.library.register_vmap(_name, mapped(_operator), lib=_library)
