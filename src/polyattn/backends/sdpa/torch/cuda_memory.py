"""How tensors have to lie in memory for torch's CUDA kernels, which do not ask.

The flash kernel reads 16 bytes at once, wherever rows begin: on rows that begin elsewhere it ends
the process's use of the device ("misaligned address"); cuDNN gives NaN there, the memory-efficient
kernel finds no variant. And torch keeps cuDNN's graphs without the strides of the gradient that
comes in (`MHACacheKeyWrapper` in aten/src/ATen/native/cudnn/MHA.cpp): the second of two calls that
differ in those alone gets wrong gradients. (All seen with torch 2.11 on an H100.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from polyattn.torch.internals import are_transforms_active

__all__ = ["APART", "comes_in_like", "in_vectors", "in_vectors_traced", "rows_in_memory"]

_VECTOR = 16
"""Bytes that the kernels read at once."""

APART = -0.0
"""A dropout of nothing that keeps our graphs of cuDNN apart from those of torch's own function.

Keys are compared byte by byte; what comes in to backward may have any strides there.
"""


def in_vectors(x: Tensor) -> Tensor:
    """Return `x` with rows that begin at multiples of 16 bytes; itself where they do.

    >>> x = torch.zeros(4, 16, dtype=torch.bfloat16)
    >>> in_vectors(x) is x, in_vectors(x[:, :8]).stride(), in_vectors(x[:, 3:11]).stride()
    (True, (16, 1), (8, 1))
    >>> in_vectors(x.as_strided((1, 8), (11, 1))).stride()
    (8, 1)
    """
    step = _VECTOR // x.element_size()
    *rows, last = zip(x.shape, x.stride(), strict=True)
    lies = last[0] <= 1 or last[1] == 1
    if not (lies and all(size <= 1 or stride % step == 0 for size, stride in rows) and _begins(x)):
        return x.clone(memory_format=torch.contiguous_format)
    for dim in range(len(rows) - 1, -1, -1):  # the memory-efficient kernel asks these strides, too
        if rows[dim][0] == 1 and rows[dim][1] % step:
            x = x.squeeze(dim).unsqueeze(dim)
    return x


@functools.cache
def in_vectors_traced() -> Callable[[Tensor], Tensor]:
    """Return :func:`in_vectors` for compiled code: Dynamo knows no offsets, what it hands on does.

    Asked for where the compiler is there: this loads it.
    """
    return cast(Callable[[Tensor], Tensor], torch.compiler.allow_in_graph(in_vectors))  # type: ignore[no-untyped-call]


def _begins(x: Tensor) -> bool:
    if not torch.compiler.is_compiling():
        try:
            return x.data_ptr() % _VECTOR == 0
        except RuntimeError:  # a tensor without memory, which is traced
            pass
    return x.storage_offset() * x.element_size() % _VECTOR == 0


def rows_in_memory(mask: Tensor) -> Tensor:
    """Return a mask whose last dim lies in memory, however it broadcasts.

    >>> rows_in_memory(torch.zeros(2, 1).expand(2, 8)).stride()
    (8, 1)
    """
    return mask if mask.stride(-1) == 1 else mask.contiguous()


class _ComesInLike(torch.autograd.Function):
    """The identity, whose gradient lies in memory as the value does."""

    generate_vmap_rule = True

    @staticmethod
    def forward(out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.strides = inputs[0].stride()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0]
        if torch.compiler.is_compiling():  # compilers choose the strides of what is between
            return cast(Tensor, torch.ops.polyattn.restrided(grad, ctx.strides))
        return grad if grad.stride() == ctx.strides else _restrided(grad, ctx.strides)


def comes_in_like(out: Tensor) -> Tensor:
    """Return `out`; the gradient that comes in to it will have its strides.

    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> out = comes_in_like((x * 2).t())
    >>> (grad,) = torch.autograd.grad(out.sum(), x)
    >>> grad.stride()
    (3, 1)
    """
    if not out.requires_grad:
        return out
    if torch.compiler.is_compiling() or are_transforms_active():
        return cast(Tensor, _ComesInLike.apply(out))  # type: ignore[no-untyped-call]
    strides = out.stride()  # a hook costs a tenth of a function

    def restride(grad: Tensor) -> Tensor | None:
        return None if grad.stride() == strides else _restrided(grad, strides)

    out.register_hook(restride)  # type: ignore[no-untyped-call]
    return out


def _restrided(x: Tensor, strides: Sequence[int]) -> Tensor:
    return x.new_empty_strided(x.shape, strides).copy_(x)


_library = torch.library.Library("polyattn", "FRAGMENT")
_library.define("restrided(Tensor x, SymInt[] strides) -> Tensor")
_library.impl("restrided", _restrided, "CompositeExplicitAutograd")
torch.library.register_fake(
    "polyattn::restrided", lambda x, strides: x.new_empty_strided(x.shape, strides), lib=_library
)
