"""The kernels as operators of torch: ``polyattn::native_attention`` and its backward pass.

Compilers, exports, fake tensors and function transforms see these; eager calls on plain tensors
go straight to `calls`. An exported program that holds them runs after an import of this module.

The masks come as a program (see `polyattn.native.program`): `codes`, and the `arrays` they name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from polyattn.torch.backends.native_cpu.calls import (
    Constants,
    Extras,
    Needs,
    backward,
    empty_like_rows,
    empty_lse,
    empty_out,
    forward,
)

__all__ = ["native_attention", "native_attention_backward", "raise_second_derivative"]

_EXTRAS = "Tensor? bias, Tensor? slopes, Tensor? sinks, SymInt[] codes, Tensor[] arrays"
_CONSTANTS = "str layout, float scale, float softcap"
_library = torch.library.Library("polyattn", "FRAGMENT")
_library.define(
    f"native_attention(Tensor q, Tensor k, Tensor v, {_EXTRAS}, {_CONSTANTS}, bool wants_lse)"
    " -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_library.define(
    "native_attention_backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, "
    f"Tensor out, Tensor lse, {_EXTRAS}, {_CONSTANTS}, bool wants_dbias, bool wants_dsinks)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
native_attention: Callable[..., tuple[Tensor, Tensor]]
native_attention = torch.ops.polyattn.native_attention.default
native_attention_backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]
native_attention_backward = torch.ops.polyattn.native_attention_backward.default


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, slopes: Tensor | None,
    sinks: Tensor | None, codes: Sequence[int], arrays: Sequence[Tensor], layout: str,
    scale: float, softcap: float, wants_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out and lse; where the lse is not wanted it is empty."""
    extras, constants = (
        Extras(bias, slopes, sinks, codes, arrays),
        Constants(layout, scale, softcap),
    )
    out, lse = forward(q, k, v, extras, constants, wants_lse)
    return out, _nothing(q) if lse is None else lse


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, slopes: Tensor | None,
    sinks: Tensor | None, codes: Sequence[int], arrays: Sequence[Tensor], layout: str,
    scale: float, softcap: float, wants_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = empty_out(q, k, v, layout)
    return out, empty_lse(q, layout) if wants_lse else _nothing(q)


def _nothing(q: Tensor) -> Tensor:
    return q.new_empty((0,), dtype=torch.float32)


def _backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, bias: Tensor | None, slopes: Tensor | None, sinks: Tensor | None,
    codes: Sequence[int], arrays: Sequence[Tensor], layout: str, scale: float, softcap: float,
    wants_dbias: bool, wants_dsinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, bias and sinks; the last two are empty if not wanted."""
    extras, constants = (
        Extras(bias, slopes, sinks, codes, arrays),
        Constants(layout, scale, softcap),
    )
    needs = Needs(wants_dbias, wants_dsinks)
    dq, dk, dv, dbias, dsinks = backward(dout, dlse, q, k, v, out, lse, extras, constants, needs)
    return (
        dq, dk, dv, _nothing(q) if dbias is None else dbias,
        _nothing(q) if dsinks is None else dsinks,
    )  # fmt: skip


def _backward_fake(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, bias: Tensor | None, slopes: Tensor | None, sinks: Tensor | None,
    codes: Sequence[int], arrays: Sequence[Tensor], layout: str, scale: float, softcap: float,
    wants_dbias: bool, wants_dsinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (empty_like_rows(x, x.shape[-1], layout) for x in (q, k, v))
    dbias = bias.new_empty(bias.shape) if wants_dbias and bias is not None else _nothing(q)
    dsinks = sinks.new_empty(sinks.shape) if wants_dsinks and sinks is not None else _nothing(q)
    return dq, dk, dv, dbias, dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, slopes, sinks, codes, arrays, layout, scale, softcap, _ = inputs
    ctx.save_for_backward(q, k, v, *output, bias, slopes, sinks, *arrays)
    ctx.codes, ctx.constants = codes, (layout, scale, softcap)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, bias, slopes, sinks, *arrays = ctx.saved_tensors
    wanted = [bool(need) for need in ctx.needs_input_grad[:6]]
    if not lse.numel():
        raise RuntimeError(
            "got a backward pass of polyattn::native_attention called with wants_lse=False, "
            "expected wants_lse=True where gradients are wanted."
        )
    if wanted[4]:
        raise RuntimeError(
            "got slopes that need a gradient in polyattn::native_attention, expected slopes "
            "without; pass them as a dense bias to train them."
        )
    grads = native_attention_backward(
        dout, dlse, q, k, v, out, lse, bias, slopes, sinks, ctx.codes, arrays, *ctx.constants,
        wanted[3], wanted[5],
    )  # fmt: skip
    dq, dk, dv, dbias, dsinks = grads
    each = dq, dk, dv, dbias, None, dsinks
    given = [grad if need else None for grad, need in zip(each, wanted, strict=True)]
    # torch holds an empty list of numbers for one of tensors, and wants its like back
    return (*given, None if ctx.codes else [], [None] * len(arrays), None, None, None, None)


def raise_second_derivative(*_: Any) -> NoReturn:
    """Say that there is none; takes what the backward of a backward pass is given."""
    raise RuntimeError(
        "got a second derivative of native_cpu attention, expected first ones only; the backends "
        "sdpa_math and reference can be differentiated twice."
    )


def _each(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
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


for _name, _real, _fake in (
    ("native_attention", _forward, _forward_fake),
    ("native_attention_backward", _backward, _backward_fake),
):
    _library.impl(_name, _real, "CPU")
    torch.library.register_fake(f"polyattn::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    "polyattn::native_attention", _differentiate, setup_context=_save, lib=_library
)
torch.library.register_autograd(
    "polyattn::native_attention_backward", raise_second_derivative, lib=_library
)
torch.library.register_vmap("polyattn::native_attention", _each(native_attention), lib=_library)
torch.library.register_vmap(
    "polyattn::native_attention_backward", _each(native_attention_backward), lib=_library
)
