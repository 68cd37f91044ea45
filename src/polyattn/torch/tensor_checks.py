"""Whether tensors are alike in all that a choice rests on, in a fraction of a microsecond."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.torch.internals import is_grad_enabled, tensor_guards, transform_level, transforms

__all__ = ["tensor_check"]


def tensor_check(
    q: Tensor, k: Tensor, v: Tensor, free: tuple[int, ...] = ()
) -> Callable[..., bool]:
    """Return ``check(q, k, v)``: whether three tensors are alike in all that a choice rests on.

    In the dims `free` their sizes may differ.

    torch's own compiled guard looks at type, dtype, device, shape, the last stride, gradients and
    the dispatch state (autocast, inference mode, function transforms) in 0.2 us.
    """
    check, mode = _check(q, k, v, free), is_grad_enabled()
    if names := transforms():  # of which it is only told that there are some
        return lambda q, k, v: (
            transforms() == names and is_grad_enabled() is mode and check(q, k, v)
        )
    if not (q.requires_grad or k.requires_grad or v.requires_grad):
        return check
    # the compiled guard does not look at the mode
    return lambda q, k, v: is_grad_enabled() is mode and check(q, k, v)


def _check(q: Tensor, k: Tensor, v: Tensor, free: tuple[int, ...]) -> Callable[..., bool]:
    if q is k or k is v or q is v:
        return _check_of_same(q, k, v, free)
    check = _compiled_check((q, k, v), free)
    return check if check is not None and check(q, k, v) else _slow_check((q, k, v), free)


def _compiled_check(
    tensors: tuple[Tensor, ...], free: tuple[int, ...]
) -> Callable[..., bool] | None:
    guards = tensor_guards()
    if guards is None:
        return None
    try:
        return guards(  # type: ignore[no-any-return]
            *tensors,
            dynamic_dims_sizes=[_sizes(x, free) for x in tensors],
            dynamic_dims_strides=list(map(_strides, tensors)),
        ).check
    except (TypeError, SystemError):
        return None


def _sizes(x: Tensor, free: tuple[int, ...]) -> list[int | None]:
    return [None if dim in free else size for dim, size in enumerate(x.shape)]


def _strides(x: Tensor) -> list[int | None]:
    """Return the strides that a choice rests on: that of the last dim; kernels read the others."""
    if x.dim() == 0 or x.shape[-1] <= 1:
        return [None] * x.dim()
    return [*[None] * (x.dim() - 1), x.stride(-1)]


def _check_of_same(q: Tensor, k: Tensor, v: Tensor, free: tuple[int, ...]) -> Callable[..., bool]:
    """Check calls that pass one tensor twice or thrice, which the compiled guard never accepts."""
    if q is k and k is v:
        one = _compiled_check((q,), free)
        if one is None or not one(q):
            return _slow_check((q, k, v), free)
        return lambda q, k, v: q is k and k is v and one(q)
    other = v if q is k else k
    two = _compiled_check((q, other), free)
    if two is None or not two(q, other):
        return _slow_check((q, k, v), free)
    if q is k:
        return lambda q, k, v: q is k and two(q, v)
    if k is v:
        return lambda q, k, v: k is v and two(q, k)
    return lambda q, k, v: q is v and two(q, k)


def _facts(x: Tensor, free: tuple[int, ...]) -> tuple[Any, ...]:
    kind = x.device.type
    return (
        type(x), x.dtype, x.device, *_sizes(x, free), *_strides(x), x.requires_grad,
        x.is_inference(), x.is_neg(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        transform_level(),
    )  # fmt: skip


def _slow_check(tensors: tuple[Tensor, ...], free: tuple[int, ...]) -> Callable[..., bool]:
    facts = [_facts(x, free) for x in tensors]

    def check(*others: Tensor) -> bool:
        return all(isinstance(x, Tensor) for x in others) and facts == [
            _facts(x, free) for x in others
        ]

    return check
