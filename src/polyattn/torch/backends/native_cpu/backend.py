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
from torch._C import _are_functorch_transforms_active, _get_tracing_state, _len_torch_dispatch_stack
from torch.autograd import forward_ad

from polyattn import settings
from polyattn.biases import Alibi
from polyattn.native import module
from polyattn.problem import Problem
from polyattn.torch.backends.native_cpu.arguments import DTYPES, program_of, terms_of
from polyattn.torch.backends.native_cpu.autograd import attend, transform
from polyattn.torch.backends.native_cpu.calls import Constants, Extras, forward
from polyattn.torch.backends.native_cpu.operator import native_attention
from polyattn.torch.backends.native_cpu.paged import paged_kernel

__all__ = ["load"]

Kernel = Callable[..., Any]
_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})
_WATCHERS = _are_functorch_transforms_active, _len_torch_dispatch_stack, _get_tracing_state
_is_lazy_copy: Callable[[Tensor], bool] = torch._C._is_cow_tensor  # type: ignore[attr-defined]
EXCHANGE: Any = getattr(Tensor, "__dlpack_c_exchange_api__", None)
"""How C reads a tensor without a Python call. It would copy what is to be copied on write only."""

_STATIC = frozenset({"And", "Or", "Causal", "Window", "Full"})  # masks without arrays


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
    by_operator = _operator_kernel(problem, constants, trains)
    if problem.compiled:
        return by_operator
    plainest = problem.contiguous and problem.layout != "packed" and problem.bias is None
    static = problem.mask is None or problem.mask.kinds <= _STATIC
    small = not (problem.sinks or problem.lse or trains)
    if plainest and static and small and EXCHANGE is not None:
        return _bare_kernel(problem, constants, by_operator)
    return _eager_kernel(problem, constants, trains, by_operator)


def _operator_kernel(problem: Problem, constants: Constants, trains: bool) -> Kernel:
    """The way through the operators, which compilers trace, and through function transforms."""
    lse_too, layout, operator = problem.lse, constants.layout, native_attention
    traced = problem.compiled

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        dtype, (dense, slopes) = q.dtype, _split(bias)
        if trains and _wants_wide(dtype, dense, sinks):
            q, k, v = q.float(), k.float(), v.float()
        codes, arrays = program_of(mask, q, k, layout)
        if not traced and (_are_functorch_transforms_active() or forward_ad._current_level >= 0):
            extras = Extras(dense, slopes, sinks, codes, arrays)
            out, lse = transform(q, k, v, extras, constants)
        else:
            out, lse = operator(
                q, k, v, dense, slopes, sinks, list(codes), arrays, *constants, lse_too or trains
            )
        return (out.to(dtype), lse) if lse_too else out.to(dtype)

    return kernel


def _eager_kernel(problem: Problem, constants: Constants, trains: bool, careful: Kernel) -> Kernel:
    """The way past the operators, for everything that a problem may hold."""
    lse_too, layout = problem.lse, constants.layout

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        dense, slopes = _split(bias)
        arrays_given = (q, k, v, dense, slopes, sinks)
        if _is_watched() or not all(type(x) in _PLAIN for x in arrays_given):
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
        return (out, lse) if lse_too else out

    return kernel


def _wants_wide(dtype: torch.dtype, bias: Tensor | None, sinks: Tensor | None) -> bool:
    """Say whether a gradient is wanted in more digits than outputs in `dtype` have.

    The gradients of bias and sinks are made of row sums of dout * out, so `out` may not be rounded
    to a half type where they are float32: such problems run in float32.
    """
    return any(
        x is not None and x.requires_grad and x.dtype.itemsize > dtype.itemsize
        for x in (bias, sinks)
    )


def _is_watched() -> bool:
    """Say whether something has to see what is done with plain tensors."""
    return (
        _are_functorch_transforms_active()
        or _len_torch_dispatch_stack() > 0
        or _get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def _split(bias: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the dense bias and the slopes of Alibi, of which one is None."""
    if bias is None:
        return None, None
    return (None, bias.payload) if isinstance(bias, Alibi) else (bias.payload, None)


def _bare_kernel(problem: Problem, constants: Constants, careful: Kernel) -> Kernel:
    """The shortest way: inference, contiguous last dims, and no mask or one without arrays.

    All that the problem fixes is made here once; the extension asks the tensors for the rest.
    """
    p = problem
    sizes = (p.batch, p.heads, p.kv_heads, p.q_len, p.kv_len, p.head_dim, p.value_dim)
    code, (layout, scale, softcap) = DTYPES[getattr(torch, p.dtype)], constants
    rows_first, alike, masked = layout == "BTNH", p.value_dim == p.head_dim, p.mask is not None
    asked, place = settings.raw(settings.NATIVE_ISA), module.isa_index()
    run, threads, plain = module.load().forward_tensors, torch.get_num_threads, _PLAIN
    functorch, modes, tracing = _WATCHERS  # in cells: quicker than globals
    raw, variable, isa_index = settings.raw, settings.NATIVE_ISA, module.isa_index
    lazy, empty_like, exchange = _is_lazy_copy, torch.empty_like, EXCHANGE
    turned = p.batch, p.q_len, p.heads, p.value_dim
    shape = turned if rows_first else (p.batch, p.heads, p.q_len, p.value_dim)
    terms: Any = None if masked else ()  # of the mask; without arrays, so always the same

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        nonlocal terms
        if not (
            type(q) in plain and type(k) in plain and type(v) in plain
            and not functorch() and not modes() and tracing() is None
            and forward_ad._current_level < 0
            and not (lazy(q) or lazy(k) or lazy(v))
        ):  # fmt: skip
            return careful(q, k, v, mask, bias, sinks)
        if terms is None:
            terms = terms_of(program_of(mask, q, k, layout)[0], (), layout)[0]
        # as calls.empty_like_rows does it, without a call and with the quickest way that serves
        if alike and q.is_contiguous():
            out = empty_like(q)
        elif rows_first:
            out = q.new_empty(shape)
        else:
            _, head, row, _ = q.stride()
            out = q.new_empty(turned).transpose(1, 2) if head < row else q.new_empty(shape)
        isa = place if raw(variable) is asked else isa_index()
        try:
            run(
                exchange, isa, threads(), code, rows_first, sizes, scale, softcap, q, k, v, out,
                terms,
            )  # fmt: skip
        except ValueError:  # zeros without memory, say: the other way knows, or says what is wrong
            return careful(q, k, v, mask, bias, sinks)
        return out

    return kernel
