"""Bugs in attention: heads, scale, mask, layout, positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from polyattn_faults.kinds.kind import Kind, floats, of
from polyattn_faults.operations import Call

__all__ = ["KINDS"]

_SDPA = ("scaled_dot_product_attention",)
_SOFTMAX = ("softmax",)


def _plain(call: Call) -> bool:
    return floats(of(call, 0, "query"), 4)


def _several_heads(call: Call) -> bool:
    return _plain(call) and of(call, 0, "query").shape[1] > 1


def _scale(call: Call) -> float:
    given = call.kwargs.get("scale")
    return of(call, 0, "query").shape[-1] ** -0.5 if given is None else float(given)


def _mask(call: Call) -> Any:
    return of(call, 3, "attn_mask")


def _causal(call: Call) -> bool:
    return bool(of(call, 5, "is_causal", False))


def _masked(call: Call, mask: Tensor | None) -> Any:
    """Return the attention under another mask."""
    query, key, value = (of(call, at, name) for at, name in enumerate(("query", "key", "value")))
    kept = {k: v for k, v in call.kwargs.items() if k in ("scale", "enable_gqa")}
    return call.func(query, key, value, attn_mask=mask, **kept)


def _lower_triangle(call: Call, diagonal: int) -> Tensor:
    query, key = of(call, 0, "query"), of(call, 1, "key")
    ones = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
    return ones.tril(diagonal)


def _has_mask(call: Call) -> bool:
    mask = _mask(call)
    return _plain(call) and isinstance(mask, Tensor) and bool((mask != mask.flatten()[0]).any())


def _grouped(call: Call) -> bool:
    return _plain(call) and of(call, 1, "key").shape[1] < of(call, 0, "query").shape[1] > 1


def _repeated_in_turn(call: Call) -> Any:
    query, key, value = (of(call, at, name) for at, name in enumerate(("query", "key", "value")))
    times = query.shape[1] // key.shape[1]
    key, value = (one.repeat(1, times, 1, 1) for one in (key, value))
    kept = {k: v for k, v in call.kwargs.items() if k != "enable_gqa"}
    return call.func(query, key, value, *call.args[3:], **kept)


def _keys_for_values(call: Call) -> Any:
    key, value = of(call, 1, "key"), of(call, 2, "value")
    return call.again(of(call, 0, "query"), value, key)


def _from_attention(call: Call) -> bool:
    """Whether it turns what attention returned: (batch, heads, tokens, dim) to tokens first."""
    given = call.args[0]
    turned = {call.args[1] % 4, call.args[2] % 4} == {1, 2} if len(call.args) == 3 else False
    return (
        floats(given, 4)
        and given.dim() == 4
        and turned
        and given.shape[1] > 1
        and call.origin(given)[0] in ("scaled_dot_product_attention", "matmul")
    )


def _reshaped(call: Call) -> Any:
    batch, heads, tokens, dim = call.args[0].shape
    return call.args[0].contiguous().view(batch, tokens, heads, dim)


def _halves(call: Call) -> bool:
    """Whether it joins the halves of a rotation: (-b, a)."""
    parts = call.args[0]
    return (
        len(parts) == 2
        and all(floats(one, 3) for one in parts)
        and parts[0].shape == parts[1].shape
        and call.origin(parts[0])[0] == "neg"
    )


def _interleaved(call: Call) -> Tensor:
    x = torch.cat((call.args[0][1], -call.args[0][0]), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _table(call: Call) -> bool:
    given = call.args[0]
    return floats(given, 2) and given.shape[-1] > 1 and given.shape[-2] > 1


def _along_another(call: Call) -> Tensor:
    return torch.softmax(call.args[0], -2)


def _shifted(call: Call) -> Any:
    mask = _mask(call)
    return _masked(call, mask.roll(1, -1))


KINDS = [
    Kind("heads swapped", _SDPA, _several_heads, lambda c: c.again().roll(1, 1)),
    Kind("softmax scale missing", _SDPA, lambda c: _plain(c) and _scale(c) != 1,
         lambda c: c.again(scale=1.0)),
    Kind("softmax scale of the whole width", _SDPA, _several_heads,
         lambda c: c.again(scale=(_scale(c) / math.sqrt(of(c, 0, "query").shape[1])))),
    Kind("softmax scaled twice", _SDPA, lambda c: _plain(c) and _scale(c) != 1,
         lambda c: c.again(of(c, 0, "query") * _scale(c))),
    Kind("mask missing", _SDPA, _has_mask, lambda c: _masked(c, None)),
    Kind("mask off by one", _SDPA, _has_mask, _shifted),
    Kind("not causal", _SDPA, lambda c: _plain(c) and _causal(c), lambda c: _masked(c, None)),
    Kind("causal off by one", _SDPA, lambda c: _plain(c) and _causal(c),
         lambda c: _masked(c, _lower_triangle(c, 1))),
    Kind("kv heads repeated in turn", _SDPA, _grouped, _repeated_in_turn),
    Kind("keys for values", _SDPA,
         lambda c: _plain(c) and of(c, 1, "key").shape == of(c, 2, "value").shape,
         _keys_for_values),
    Kind("heads not turned back", ("transpose",), _from_attention, _reshaped),
    Kind("tokens of attention rolled", _SDPA, _plain, lambda c: c.again().roll(1, 2)),
    Kind("rotary interleaved", ("cat",), _halves, _interleaved),
    Kind("rotary the other way", ("neg",),
         lambda c: floats(c.args[0], 3), lambda c: c.args[0].clone()),
    Kind("softmax along another dimension", _SOFTMAX, _table, _along_another),
    Kind("cosine for sine", ("sin",), lambda c: floats(c.args[0], 2), lambda c: c.args[0].cos()),
]  # fmt: skip
