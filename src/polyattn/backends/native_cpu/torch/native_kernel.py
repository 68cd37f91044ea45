"""The C++ kernels as a backend: the shortest way through the extension that a problem allows.

Masks, empty rows, the lse, sinks and the isolation of NaN are the kernels' own work; nothing is
lowered here. Plain tensors in eager code go straight to the extension; what is not plain
(compilers, subclasses, function transforms, dispatch modes) goes through the operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyattn.backends.native_cpu.torch.arguments import program_of
from polyattn.backends.native_cpu.torch.autograd import attend
from polyattn.backends.native_cpu.torch.bare_kernel import bare_kernel, is_bare
from polyattn.backends.native_cpu.torch.bare_training import bare_training_kernel, trains_bare
from polyattn.backends.native_cpu.torch.calls import Constants, Extras, forward
from polyattn.backends.native_cpu.torch.inference import native_inference
from polyattn.backends.native_cpu.torch.levels import PLAIN, is_transformed
from polyattn.backends.native_cpu.torch.operator import native_attention
from polyattn.backends.native_cpu.torch.paged import paged_kernel
from polyattn.backends.native_cpu.torch.quantized import quantized_kernel
from polyattn.masks.biases import Alibi
from polyattn.native import module
from polyattn.problem import Problem
from polyattn.torch.internals import is_watched

__all__ = ["load"]

Kernel = Callable[..., Any]


def load() -> Callable[[Problem, Mapping[str, Any]], Kernel]:
    """Return `prepare`, as :class:`polyattn.registry.Backend` describes it."""
    module.load()
    return _prepare


def _prepare(problem: Problem, config: Mapping[str, Any]) -> Kernel:
    """Return a kernel for the problem."""
    scale = problem.scale if problem.scale is not None else 1 / math.sqrt(problem.head_dim)
    constants = Constants(problem.layout, scale, problem.softcap or 0.0)
    trains = problem.grad or problem.bias_grad or problem.sinks_grad
    if problem.paged is not None or problem.quantized is not None:
        make = quantized_kernel if problem.paged is None else paged_kernel
        kernel = make(problem, constants)
        return bare_kernel(problem, constants, kernel) if is_bare(problem) else kernel
    by_operator = _operator_kernel(problem, constants, trains)
    if problem.compiled:
        return _inference_kernel(problem, constants, by_operator)
    eager = _eager_kernel(problem, constants, trains, by_operator)
    if trains_bare(problem):
        return bare_training_kernel(problem, constants, eager)
    return bare_kernel(problem, constants, eager) if is_bare(problem) else eager


def _operator_kernel(problem: Problem, constants: Constants, trains: bool) -> Kernel:
    """The way through the operators, which compilers trace, and through function transforms."""
    lse_too, layout, operator = problem.lse, constants.layout, native_attention
    unfused = _is_unfused_in_torch(problem)

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        dtype, (dense, slopes) = q.dtype, _split(bias)
        if trains and _wants_wide(dtype, dense, sinks):
            q, k, v = q.float(), k.float(), v.float()
        codes, arrays = program_of(mask, q, k, layout)
        out, lse = operator(
            q, k, v, dense, slopes, sinks, list(codes), arrays, *constants, lse_too or trains
        )
        out = out.to(dtype)
        out = out.contiguous() if unfused else out
        return (out, lse) if lse_too else out

    return kernel


def _inference_kernel(problem: Problem, constants: Constants, careful: Kernel) -> Kernel:
    """The way through the operator for compiled inference, where that is all that is asked for."""
    if not is_bare(problem):
        return careful
    layout, dense = constants.layout, problem.mask is not None and "Dense" in problem.mask.kinds

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        if torch.compiler.is_exporting() or is_transformed():  # others run it, or differentiate
            return careful(q, k, v, mask, bias, sinks)
        allowed, added = mask.mask if dense else None, None if bias is None else bias.payload
        codes, arrays = program_of(None if dense else mask, q, k, layout)
        return native_inference(q, k, v, allowed, added, list(codes), arrays, *constants)

    return kernel


def _eager_kernel(problem: Problem, constants: Constants, trains: bool, careful: Kernel) -> Kernel:
    """The way past the operators, for everything that a problem may hold."""
    lse_too, layout, unfused = problem.lse, constants.layout, _is_unfused_in_torch(problem)

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        dense, slopes = _split(bias)
        arrays_given = (q, k, v, dense, slopes, sinks)
        if is_watched() or not all(type(x) in PLAIN for x in arrays_given):
            return careful(q, k, v, mask, bias, sinks)
        codes, arrays = program_of(mask, q, k, layout)
        if not all(type(x) in PLAIN for x in arrays):
            return careful(q, k, v, mask, bias, sinks)
        extras, dtype = Extras(dense, slopes, sinks, codes, arrays), q.dtype
        if not trains:
            out, lse = forward(q, k, v, extras, constants, lse_too)
        elif _wants_wide(dtype, dense, sinks):
            out, lse = attend(q.float(), k.float(), v.float(), extras, constants)
            out = out.to(dtype)
        else:
            out, lse = attend(q, k, v, extras, constants)
        out = out.contiguous() if unfused else out
        return (out, lse) if lse_too else out

    return kernel


def _is_unfused_in_torch(problem: Problem) -> bool:
    """Say whether torch has no fused kernel for a bias that trains: its output is contiguous."""
    return problem.bias_grad and problem.layout == "BNTH"


def _wants_wide(dtype: torch.dtype, bias: Tensor | None, sinks: Tensor | None) -> bool:
    """Say whether a gradient is wanted in more digits than outputs in `dtype` have.

    The gradients of bias and sinks are made of row sums of dout * out, so `out` may not be rounded
    to a half type where they are float32: such problems run in float32.
    """
    return any(
        x is not None and x.requires_grad and x.dtype.itemsize > dtype.itemsize
        for x in (bias, sinks)
    )


def _split(bias: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the dense bias and the slopes of Alibi, of which one is None."""
    if bias is None:
        return None, None
    return (None, bias.payload) if isinstance(bias, Alibi) else (bias.payload, None)
