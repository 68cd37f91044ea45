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

from polyattn import settings
from polyattn.backends.native_cpu.torch.arguments import DTYPES, program_of
from polyattn.backends.native_cpu.torch.autograd import attend
from polyattn.backends.native_cpu.torch.calls import Constants, Extras, forward
from polyattn.backends.native_cpu.torch.inference import EXCHANGE, native_inference
from polyattn.backends.native_cpu.torch.levels import PLAIN, WATCHERS, is_transformed
from polyattn.backends.native_cpu.torch.operator import native_attention
from polyattn.backends.native_cpu.torch.paged import paged_kernel
from polyattn.backends.native_cpu.torch.quantized import quantized_kernel
from polyattn.backends.native_cpu.torch.short_masks import is_short, terms_reader
from polyattn.masks.biases import Alibi
from polyattn.native import module
from polyattn.native.forms import isa_for
from polyattn.problem import Problem
from polyattn.torch.internals import dual_levels, is_lazy_copy, is_watched

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
    if problem.paged is not None:
        return paged_kernel(problem, constants)
    if problem.quantized is not None:
        return quantized_kernel(problem, constants)
    by_operator = _operator_kernel(problem, constants, trains)
    if problem.compiled:
        return _inference_kernel(problem, constants, by_operator)
    eager = _eager_kernel(problem, constants, trains, by_operator)
    return _bare_kernel(problem, constants, eager) if _is_bare(problem) else eager


def _is_bare(problem: Problem) -> bool:
    """Say whether the extension reads all there is from the tensors."""
    extra = problem.sinks or problem.lse or problem.grad or problem.bias_grad or problem.sinks_grad
    plainest = problem.contiguous and problem.layout != "packed" and not extra
    bias = problem.bias_structure
    readable = bias is None or bias.kind == "DenseBias"
    return plainest and readable and is_short(problem) and EXCHANGE is not None


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
    if not _is_bare(problem):
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


_MANY = 65  # a class of lengths begins here; from about one tile on
_read_mask: Any = None


def _as_mask(bias: Tensor, *inputs: Tensor) -> Tensor | None:
    """Return the mask that a bias of 0 and -inf is, or None for any other bias.

    A NaN or an infinity of the inputs goes past a bias, and not past a mask: then it stays a bias.
    """
    global _read_mask
    if _read_mask is None:
        _read_mask = module.load().as_mask
    mask = torch.empty(bias.shape, dtype=torch.bool)
    if not bias.dim() or not _read_mask(EXCHANGE, bias, mask):
        return None
    return mask if all(math.isfinite(x.detach().sum().item()) for x in inputs) else None


def _arrays_of(problem: Problem) -> Callable[..., Any] | None:
    """Return what gives the arrays of mask and bias for the extension; None where there are none.

    ``arrays(mask, bias, q, k, v)``: booleans and numbers to add; ValueError for what the extension
    cannot read.
    """
    dense, lazy = problem.mask is not None and "Dense" in problem.mask.kinds, is_lazy_copy
    if not dense and problem.bias is None:
        return None
    # a bias that is a mask lets tiles be skipped, which pays for looking at it
    many = problem.mask is None and min(problem.q_len, problem.kv_len) >= _MANY

    def arrays(mask: Any, bias: Any, *inputs: Tensor) -> tuple[Any, Any]:
        allowed, added = mask.mask if dense else None, None if bias is None else bias.payload
        if dense and (type(allowed) is not Tensor or lazy(allowed)):
            raise ValueError("a mask of another kind of array")
        if added is not None:
            if type(added) is not Tensor or lazy(added) or added.is_neg():
                raise ValueError("a bias of another kind of array")
            if many and (as_mask := _as_mask(added, *inputs)) is not None:
                return as_mask, None
        return allowed, added

    return arrays


def _bare_kernel(problem: Problem, constants: Constants, careful: Kernel) -> Kernel:
    """The shortest way: inference, contiguous last dims, short masks, biases of one array.

    All that the problem fixes is made here once; the extension asks the tensors for the rest, and
    for their batch and lengths, in which a problem stands for others.
    """
    code, (layout, scale, softcap) = DTYPES[getattr(torch, problem.dtype)], constants
    rows_first, last = layout == "BTNH", problem.value_dim
    alike, arrays = last == problem.head_dim, _arrays_of(problem)
    run, threads, plain = module.load().forward_tensors, torch.get_num_threads, PLAIN
    functorch, modes, recorded, tracing = WATCHERS  # in cells: quicker than globals
    raw, variable, lazy, exchange = settings.raw, settings.NATIVE_ISA, is_lazy_copy, EXCHANGE
    rows = code, problem.q_len, problem.heads, problem.kv_heads  # few or many, as all of a class
    asked, place, empty_like = raw(variable), isa_for(*rows), torch.empty_like
    read = terms_reader(problem, layout)

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        if (
            not (type(q) in plain and type(k) in plain and type(v) in plain)
            or functorch()
            or modes()
            or recorded()
            or tracing() is not None
            or dual_levels._current_level >= 0
            or (lazy(q) or lazy(k) or lazy(v))
        ):
            return careful(q, k, v, mask, bias, sinks)
        out = empty_like(q) if alike and (q.is_contiguous() or not rows_first) else None
        if out is None or out.stride(3) != 1:  # that of rows that overlap may be another
            out = q.new_empty((*q.shape[:3], last))
        isa = place if raw(variable) is asked else isa_for(*rows)
        try:
            terms, _held = ((), None) if read is None else read(mask, q, k)
            allowed, added = (None, None) if arrays is None else arrays(mask, bias, q, k, v)
            run(
                exchange, isa, threads(), code, rows_first, scale, softcap, q, k, v, out, terms,
                allowed, added,
            )  # fmt: skip
        except ValueError:  # zeros without memory, say: the other way knows, or says what is wrong
            return careful(q, k, v, mask, bias, sinks)
        return out

    return kernel
