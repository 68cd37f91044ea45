"""Bugs in what joins layers: residuals, factors, the order of parts, positions, precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn_faults.kinds.kind import Kind, floats, of, second
from polyattn_faults.operations import Call

__all__ = ["KINDS"]

_ADD = ("add", "iadd", "radd")
_MUL = ("mul", "imul", "rmul")
_DIV = ("div", "truediv", "itruediv")
_PRODUCTS = (
    "linear", "matmul", "bmm", "addmm", "conv1d", "conv2d", "conv3d",
    "scaled_dot_product_attention",
)  # fmt: skip


def _residual(call: Call) -> bool:
    """Whether it adds two activations, of which a child made one."""
    a, b = call.args[0], second(call)
    if not (floats(a, 3) and floats(b, 3)) or a.shape != b.shape:
        return False
    return any(call.origin(one)[0].startswith("call:") for one in (a, b))


def _later(call: Call) -> Tensor:
    a, b = call.args[0], second(call)
    return a if call.origin(a)[1] > call.origin(b)[1] else b


def _branch_alone(call: Call) -> Tensor:
    return _later(call).clone()


def _branch_twice(call: Call) -> Tensor:
    return call.again() + _later(call)


def _in_place(call: Call) -> Any:
    earlier = call.args[0] if _later(call) is second(call) else second(call)
    return earlier.add_(_later(call))


def _two_tensors(call: Call) -> bool:
    """Whether both operands are activations, and neither a child's output added as a residual."""
    a, b = call.args[0], second(call)
    return floats(a, 2) and floats(b, 1) and not _residual(call)


def _number(call: Call) -> float | None:
    value = second(call) if len(call.args) > 1 or call.kwargs else None
    if isinstance(value, Tensor):
        value = float(value) if value.dim() == 0 and not value.requires_grad else None
    return float(value) if isinstance(value, int | float) and floats(call.args[0], 2) else None


def _factor(call: Call) -> bool:
    return _number(call) not in (None, 0.0, 1.0)


def _first(call: Call) -> Tensor:
    given: Tensor = call.args[0]
    return given.clone()


def _parts(call: Call) -> bool:
    out = call.out
    return (
        isinstance(out, tuple | list)
        and len(out) > 1
        and all(floats(one, 2) and one.shape == out[0].shape for one in out)
    )


def _turned(call: Call) -> Any:
    parts = list(call.again())
    return tuple(parts[1:] + parts[:1])


def _joined(call: Call) -> bool:
    parts = call.args[0]
    return len(parts) > 1 and all(floats(one, 2) for one in parts)


def _backwards(call: Call) -> Any:
    return call.again(tuple(reversed(call.args[0])))


def _place(call: Call) -> int | None:
    """At which dimension a single place is taken from activations of three or more."""
    given, index = call.args[0], call.args[1]
    if not floats(given, 3) or not isinstance(index, tuple):
        return None
    spots = [at for at, one in enumerate(index) if type(one) is int]
    if len(spots) != 1 or index[spots[0]] not in (0, -1) or given.shape[spots[0]] < 2:
        return None
    return spots[0] if all(isinstance(one, slice) for one in index[: spots[0]]) else None


def _next_place(call: Call) -> Any:
    at = _place(call)
    index = list(call.args[1])
    assert at is not None
    index[at] += 1 if index[at] == 0 else -1
    return call.func(call.args[0], tuple(index))


def _coarse(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype is torch.float32 else torch.float8_e4m3fn


def _rounded(value: Any) -> Any:
    return value.to(_coarse(value.dtype)).to(value.dtype) if floats(value) else value


def _in_lower_precision(call: Call) -> Any:
    kwargs = {name: _rounded(value) for name, value in call.kwargs.items()}
    return _rounded(call.func(*map(_rounded, call.args), **kwargs))


def _clamped(call: Call) -> Tensor:
    out: Tensor = call.again()
    limit = 0.6 * float(out.abs().max())
    return out.clamp(-limit, limit)


def _overflowed(call: Call) -> Tensor:
    out: Tensor = call.again()
    return out.where(out.abs() < out.abs().max(), torch.inf)


def _to_numbers(call: Call) -> Any:
    return call.again() + 1


def _counts(call: Call) -> bool:
    return isinstance(call.out, Tensor) and call.out.dim() == 1 and len(call.out) > 1


def _normed(call: Call) -> bool:
    """Whether a norm multiplies by its own weight here."""
    own = {id(p) for p in call.owner.parameters(recurse=False)}
    return "Norm" in type(call.owner).__name__ and any(id(t) in own for t in call.tensors)


def _without_weight(call: Call) -> Tensor:
    own = {id(p) for p in call.owner.parameters(recurse=False)}
    return next(t for t in call.tensors if id(t) not in own).clone()


def _linear(call: Call) -> bool:
    return floats(call.args[0], 2)


def _has_bias(call: Call) -> bool:
    return isinstance(of(call, 2, "bias"), Tensor)


def _without_bias(call: Call) -> Any:
    if "bias" in call.kwargs:
        return call.again(bias=None)
    return call.func(*call.args[:2], None, *call.args[3:], **call.kwargs)


def _embedded(call: Call) -> Tensor:
    out: Tensor = call.again()
    return out * out.shape[-1] ** 0.5


KINDS = [
    Kind("residual missing", _ADD, _residual, _branch_alone),
    Kind("branch added twice", _ADD, _residual, _branch_twice),
    Kind("residual in place", ("add",), _residual, _in_place),
    Kind("addend forgotten", _ADD, _two_tensors, _first),
    Kind("factor forgotten", (*_MUL, *_DIV), _factor, _first),
    Kind("product with a tensor forgotten", _MUL,
         lambda c: floats(c.args[0], 3) and floats(second(c), 1) and not _normed(c), _first),
    Kind("quotient forgotten", _DIV,
         lambda c: floats(c.args[0], 2) and floats(second(c), 1), _first),
    Kind("one plus forgotten", _ADD,
         lambda c: _number(c) == 1.0 or (c.args[0] == 1 if type(c.args[0]) is int else False),
         lambda c: next(iter(c.tensors)).clone()),
    Kind("norm without weight", _MUL, _normed, _without_weight),
    Kind("parts in another order", ("chunk", "split", "tensor_split", "unbind"), _parts, _turned),
    Kind("joined in another order", ("cat",), _joined, _backwards),
    Kind("another token taken", ("getitem",), lambda c: _place(c) is not None, _next_place),
    Kind("positions off by one", ("arange",), _counts, _to_numbers),
    Kind("one product in lower precision", _PRODUCTS, _linear, _in_lower_precision),
    Kind("large values clamped", ("linear", "conv2d", "addmm"), _linear, _clamped),
    Kind("overflowed to infinity", ("linear", "conv2d", "addmm"), _linear, _overflowed),
    Kind("bias dropped", ("linear", "conv1d", "conv2d", "conv3d"), _has_bias, _without_bias),
    Kind("bias dropped", ("addmm",), _linear, lambda c: c.args[1] @ c.args[2]),
    Kind("embedding scaled", ("embedding",), lambda c: floats(c.out, 2), _embedded),
]  # fmt: skip
