"""The kernels as operators of torch: ``polyattn::native_attention`` and its backward pass.

Compilers, exports, fake tensors and function transforms see these; eager calls on plain tensors
go straight to `calls`. An exported program that holds them runs after an import of this module.

The masks come as a program (see `polyattn.native.program`): `codes`, and the `arrays` they name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyattn.backends.native_cpu.torch.calls import (
    Constants,
    Extras,
    Needs,
    empty_like_rows,
    empty_lse,
    empty_out,
    forward,
)
from polyattn.backends.native_cpu.torch.gradients import gradients

__all__ = ["native_attention", "native_attention_backward", "nothing"]

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
    """Return out and lse; where the lse is not wanted it is empty."""
    extras, constants = (
        Extras(bias, slopes, sinks, codes, arrays),
        Constants(layout, scale, softcap),
    )
    out, lse = forward(q, k, v, extras, constants, wants_lse)
    return out, nothing(q) if lse is None else lse


def _forward_fake(
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
    out = empty_out(q, k, v, layout)
    return out, empty_lse(q, layout) if wants_lse else nothing(q)


def nothing(q: Tensor) -> Tensor:
    """Return what stands for a result that is not wanted: operators have no None for it."""
    return q.new_empty((0,), dtype=torch.float32)


def _backward(
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
    """Return the gradients of q, k, v, bias and sinks; the last two are empty if not wanted."""
    extras, constants = (
        Extras(bias, slopes, sinks, codes, arrays),
        Constants(layout, scale, softcap),
    )
    needs = Needs(wants_dbias, wants_dsinks)
    dq, dk, dv, dbias, dsinks = gradients(dout, dlse, q, k, v, out, lse, extras, constants, needs)
    return (
        dq,
        dk,
        dv,
        nothing(q) if dbias is None else dbias,
        nothing(q) if dsinks is None else dsinks,
    )


def _backward_fake(
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
    dq, dk, dv = (empty_like_rows(x, x.shape[-1], layout) for x in (q, k, v))
    dbias = bias.new_empty(bias.shape) if wants_dbias and bias is not None else nothing(q)
    dsinks = sinks.new_empty(sinks.shape) if wants_dsinks and sinks is not None else nothing(q)
    return dq, dk, dv, dbias, dsinks


for _name, _real, _fake in (
    ("native_attention", _forward, _forward_fake),
    ("native_attention_backward", _backward, _backward_fake),
):
    _library.impl(_name, _real, "CPU")
    torch.library.register_fake(f"polyattn::{_name}", _fake, lib=_library)
