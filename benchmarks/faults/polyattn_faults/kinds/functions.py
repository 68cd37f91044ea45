"""Bugs in functions of one tensor: activations, norms, up-sampling, routing, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from polyattn_faults.kinds.kind import Kind, floats, of
from polyattn_faults.operations import Call

__all__ = ["KINDS"]


def _any(call: Call) -> bool:
    return floats(call.args[0], 2)


def _other_gelu(call: Call) -> Tensor:
    exact = call.kwargs.get("approximate", "none") == "none"
    return F.gelu(call.args[0], approximate="tanh" if exact else "none")


_OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.gelu,
    "gelu": F.relu,
    "relu": F.gelu,
    "softplus": F.relu,
}


def _instead(call: Call) -> Tensor:
    x: Tensor = call.args[0]
    return _OTHERS[call.name](x)


def _plain_norm(call: Call) -> bool:
    """Whether it is a whole norm that is given its weight."""
    return _any(call) and isinstance(_weight(call), Tensor)


def _weight(call: Call) -> Any:
    return of(call, 2, "weight")


def _weightless(call: Call) -> Any:
    kwargs = {k: v for k, v in call.kwargs.items() if k != "weight"}
    return call.func(*call.args[:2], None, *call.args[3:], **kwargs)


def _not_centred(call: Call) -> Tensor:
    """As an RMS norm would."""
    x, shape, weight, bias = (
        of(call, at, name)
        for at, name in enumerate(("input", "normalized_shape", "weight", "bias"))
    )
    out: Tensor = F.rms_norm(x, shape, weight, of(call, 4, "eps", 1e-5))
    return out if bias is None else out + bias


def _groups(call: Call) -> int:
    return int(of(call, 1, "num_groups"))


def _other_groups(call: Call) -> Any:
    return call.again(call.args[0], _groups(call) // 2)


def _other_mode(call: Call) -> Any:
    return F.interpolate(call.args[0], of(call, 1, "size"), of(call, 2, "scale_factor"), "bilinear")


def _nearest(call: Call) -> bool:
    return _any(call) and call.args[0].dim() == 4 and of(call, 3, "mode", "nearest") == "nearest"


def _next_best(call: Call) -> Any:
    x, k = call.args[0], int(of(call, 1, "k"))
    values, indices = torch.topk(x, k + 1, dim=-1)
    return torch.return_types.topk((values[..., 1:].contiguous(), indices[..., 1:].contiguous()))


def _left_on(call: Call) -> Tensor:
    return F.dropout(call.args[0], 0.1, True)


def _padded_before(call: Call) -> bool:
    pads = list(of(call, 1, "pad"))
    return _any(call) and any(pads) and pads != pads[::-1]


def _other_side(call: Call) -> Any:
    pads = list(of(call, 1, "pad"))
    turned = [pads[at + 1 - 2 * (at % 2)] for at in range(len(pads))]
    return call.func(call.args[0], turned, *call.args[2:])


KINDS = [
    Kind("other gelu", ("gelu",), _any, _other_gelu),
    Kind("other activation", ("silu", "gelu", "relu", "softplus"), _any, _instead),
    Kind("norm without weight", ("layer_norm", "group_norm", "rms_norm"), _plain_norm, _weightless),
    Kind("norm does not centre", ("layer_norm",), _plain_norm, _not_centred),
    Kind("group count", ("group_norm",), lambda c: _groups(c) % 2 == 0, _other_groups),
    Kind("up-sampling mode", ("interpolate",), _nearest, _other_mode),
    Kind("next best experts", ("topk",),
         lambda c: floats(c.args[0], 2) and c.args[0].shape[-1] > int(of(c, 1, "k")), _next_best),
    Kind("dropout left on", ("dropout",), _any, _left_on),
    Kind("padded at the other side", ("pad",), _padded_before, _other_side),
]  # fmt: skip
