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

from polyattn.biases import Alibi
from polyattn.native import module
from polyattn.problem import Problem
from polyattn.torch.backends.native_cpu.arguments import DTYPES, program_of, terms_of
from polyattn.torch.backends.native_cpu.autograd import attend, transform
from polyattn.torch.backends.native_cpu.calls import Constants, Extras, forward
from polyattn.torch.backends.native_cpu.operator import native_attention
from polyattn.torch.backends.native_cpu.paged import paged_kernel
from polyattn.torch.internals import (
    are_transforms_active,
    dispatch_modes,
    dual_level,
    tracing_state,
)

__all__ = ["load"]

Kernel = Callable[..., Any]
_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})
_WATCHERS = are_transforms_active, dispatch_modes, tracing_state
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
    if plainest and static and not (problem.sinks or problem.lse or trains):
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
        if not traced and (are_transforms_active() or dual_level() >= 0):
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
        are_transforms_active()
        or dispatch_modes() > 0
        or tracing_state() is not None
        or dual_level() >= 0
    )


def _split(bias: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the dense bias and the slopes of Alibi, of which one is None."""
    if bias is None:
        return None, None
    return (None, bias.payload) if isinstance(bias, Alibi) else (bias.payload, None)


def _bare_kernel(problem: Problem, constants: Constants, careful: Kernel) -> Kernel:
    """The shortest way: inference, contiguous last dims, and no mask or one without arrays.

    All that the problem fixes is made here once; a call takes pointers and strides.
    """
    p = problem
    sizes = (p.batch, p.heads, p.kv_heads, p.q_len, p.kv_len, p.head_dim, p.value_dim)
    code = DTYPES[getattr(torch, p.dtype)]
    fixed = (module.isa_index(), code, sizes, constants.scale, constants.softcap)
    terms: Any = () if p.mask is None else None  # of the mask; without arrays, so always the same

    def terms_for(mask: Any, q: Tensor, k: Tensor) -> Any:
        nonlocal terms
        if terms is None:
            terms = terms_of(program_of(mask, q, k, "BTNH")[0], (), "BTNH")[0]
        return terms

    return (_rows_first if p.layout == "BTNH" else _heads_first)(p, fixed, terms_for, careful)


def _rows_first(problem: Problem, fixed: Any, terms_for: Any, careful: Kernel) -> Kernel:
    """The bare kernel for (B, T, N, H)."""
    run, threads, plain = module.load().forward, torch.get_num_threads, _PLAIN
    isa, code, sizes, scale, softcap = fixed
    b, n, t, width = problem.batch, problem.heads, problem.q_len, problem.value_dim
    shape, batch, row, masked = (b, t, n, width), t * n * width, n * width, problem.mask is not None
    functorch, modes, tracing = _WATCHERS  # in cells: quicker than globals
    empty_like, alike = torch.empty_like, width == problem.head_dim

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        if not (
            type(q) in plain and type(k) in plain and type(v) in plain
            and not functorch() and not modes() and tracing() is None
            and dual_level() < 0
        ):  # fmt: skip
            return careful(q, k, v, mask, bias, sinks)
        q0, q1, q2, _ = q.stride()
        k0, k1, k2, _ = k.stride()
        v0, v1, v2, _ = v.stride()
        # empty_like is the quicker of the two, and for contiguous tensors the same
        out = empty_like(q) if alike and q.is_contiguous() else q.new_empty(shape)
        run(
            isa, threads(), code, sizes, scale, softcap, (q.data_ptr(), q0, q2, q1),
            (k.data_ptr(), k0, k2, k1), (v.data_ptr(), v0, v2, v1),
            (out.data_ptr(), batch, width, row), None, terms_for(mask, q, k) if masked else (),
            None, None, None, None, None,
        )  # fmt: skip
        return out

    return kernel


def _heads_first(problem: Problem, fixed: Any, terms_for: Any, careful: Kernel) -> Kernel:
    """The bare kernel for (B, N, T, H); where it lies as (B, T, N, H) so does the output."""
    run, threads, plain = module.load().forward, torch.get_num_threads, _PLAIN
    isa, code, sizes, scale, softcap = fixed
    b, n, t, width = problem.batch, problem.heads, problem.q_len, problem.value_dim
    batch, masked = n * t * width, problem.mask is not None
    functorch, modes, tracing = _WATCHERS

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        if not (
            type(q) in plain and type(k) in plain and type(v) in plain
            and not functorch() and not modes() and tracing() is None
            and dual_level() < 0
        ):  # fmt: skip
            return careful(q, k, v, mask, bias, sinks)
        q0, q1, q2, _ = q.stride()
        k0, k1, k2, _ = k.stride()
        v0, v1, v2, _ = v.stride()
        turned = q1 < q2
        out = q.new_empty((b, t, n, width) if turned else (b, n, t, width))
        head, row = (width, n * width) if turned else (t * width, width)
        run(
            isa, threads(), code, sizes, scale, softcap, (q.data_ptr(), q0, q1, q2),
            (k.data_ptr(), k0, k1, k2), (v.data_ptr(), v0, v1, v2),
            (out.data_ptr(), batch, head, row), None, terms_for(mask, q, k) if masked else (),
            None, None, None, None, None,
        )  # fmt: skip
        return out.transpose(1, 2) if turned else out

    return kernel
