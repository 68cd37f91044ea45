"""The shortest way through the extension for eager calls that train.

It does what :mod:`~polyattn.backends.native_cpu.torch.autograd` does for every call, and the
extension reads the tensors by itself: where a model is small, its kernels are over in some 10 us.
Contiguous last dims, short masks, no bias, no sinks, no lse; all else goes the careful way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn import settings
from polyattn.backends.native_cpu.torch.arguments import DTYPES, program_of
from polyattn.backends.native_cpu.torch.calls import Constants, Extras, Needs, backward
from polyattn.backends.native_cpu.torch.inference import EXCHANGE
from polyattn.backends.native_cpu.torch.levels import PLAIN, is_batched
from polyattn.backends.native_cpu.torch.operator import native_attention_backward
from polyattn.backends.native_cpu.torch.short_masks import is_short, terms_reader
from polyattn.masks import Dense
from polyattn.native import module
from polyattn.native.forms import isa_for
from polyattn.native.program import Terms
from polyattn.problem import Problem
from polyattn.torch.internals import is_lazy_copy, is_watched
from polyattn.torch.kit.plain_calls import is_plain_call

__all__ = ["bare_training_kernel", "trains_bare"]

Kernel = Callable[..., Any]

_UNREADABLE = ValueError, BufferError, RuntimeError


class _Unreadable(Exception):
    """The extension cannot read a tensor: the careful way knows, or says what is wrong."""


def trains_bare(problem: Problem) -> bool:
    """Say whether the extension reads all there is from the tensors, in both passes."""
    extra = problem.sinks or problem.lse or problem.bias_structure is not None or problem.compiled
    plainest = problem.grad and problem.contiguous and problem.layout != "packed" and not extra
    stored = problem.paged is not None or problem.quantized is not None
    return plainest and not stored and is_short(problem) and EXCHANGE is not None


class _Call(NamedTuple):
    """What both passes of one call share.

    `form`: what the extension is told before the tensors. `held`: the arrays that the terms point
    into. `mask`: the whole of it, for the careful way; None for one of booleans.
    """

    form: tuple[Any, ...]
    terms: Terms
    held: Any
    mask: Any
    constants: Constants


class _Attention(torch.autograd.Function):
    """`forward` saves the inputs and both results; `backward` computes the tiles again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: _Call,
        allowed: Tensor | None,
        *arrays: Tensor,
    ) -> Tensor:
        form, terms, *_, (layout, *_) = call
        out = _like(q, v.shape[3], layout)
        b, n, t, _ = q.shape
        shape = (b, t, n) if layout == "BTNH" else (b, n, t)
        lse = torch.empty(shape, dtype=torch.float32)
        try:
            module.load().forward_tensors(
                *form, q, k, v, out, terms, allowed, None, None, None, lse
            )
        except _UNREADABLE as error:
            raise _Unreadable from error
        ctx.save_for_backward(q, k, v, out, lse, allowed, *arrays)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, allowed, *arrays = ctx.saved_tensors
        none = (None,) * (2 + len(arrays))
        if dout is None:
            return (None, None, None, *none)
        dq, dk, dv = _gradients(dout, q, k, v, out, lse, allowed, ctx.call)
        if all(wanted := ctx.needs_input_grad[:3]):
            return (dq, dk, dv, *none)
        each = zip((dq, dk, dv), wanted, strict=True)
        return (*(x if want else None for x, want in each), *none)


def _gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    allowed: Tensor | None,
    call: _Call,
) -> Sequence[Tensor]:
    """Return the gradients of q, k and v; differentiable where one is wanted."""
    layout = call.constants.layout
    careful = torch.is_grad_enabled() or is_watched() or type(dout) not in PLAIN or is_batched(dout)
    if not careful and dout.dtype is out.dtype:
        into = (
            _like(q, q.shape[3], layout),
            _like(k, k.shape[3], layout),
            _like(v, v.shape[3], layout),
        )
        came = dout if dout.stride(3) == 1 else dout.contiguous()
        try:
            module.load().backward_tensors(
                *call.form, q, k, v, out, lse, came, into, call.terms, allowed
            )
            return into
        except _UNREADABLE:  # zeros without memory, say: the other way knows, or says what is wrong
            pass
    mask = call.mask if allowed is None else Dense(allowed)
    codes, arrays = program_of(mask, q, k, layout)
    if careful:
        given = dout, None, q, k, v, out, lse, None, None, None, list(codes), arrays
        found: Sequence[Tensor] = native_attention_backward(*given, *call.constants, False, False)
        return found[:3]
    extras = Extras(None, None, None, codes, arrays)
    needs = Needs(False, False)
    return backward(dout, None, q, k, v, out, lse, extras, call.constants, needs)[:3]


def _like(x: Tensor, last: int, layout: str) -> Tensor:
    """Allocate rows of `last` entries that lie in memory as those of `x` do, where it is dense."""
    if last == x.shape[3] and (layout == "BNTH" or x.is_contiguous()):
        found = torch.empty_like(x)
        if found.stride(3) == 1:  # of rows that overlap it may be another
            return found
    return x.new_empty((*x.shape[:3], last))


def bare_training_kernel(problem: Problem, constants: Constants, careful: Kernel) -> Kernel:
    """Return ``kernel(q, k, v, mask, bias, sinks)`` for problems that :func:`trains_bare` knows."""
    code, (layout, scale, softcap) = DTYPES[getattr(torch, problem.dtype)], constants
    dense = problem.mask is not None and "Dense" in problem.mask.kinds
    raw, variable, threads = settings.raw, settings.NATIVE_ISA, torch.get_num_threads
    rows = code, problem.q_len, problem.heads, problem.kv_heads  # few or many, as all of a class
    asked, place = raw(variable), isa_for(*rows)
    read, fixed = terms_reader(problem, layout), (code, layout == "BTNH", scale, softcap)
    # without torch's Python wrapper, which is for function transforms
    attend: Any = super(torch.autograd.Function, _Attention).apply

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        if not is_plain_call(q, k, v):
            return careful(q, k, v, mask, bias, sinks)
        isa = place if raw(variable) is asked else isa_for(*rows)
        form = EXCHANGE, isa, threads(), *fixed
        allowed = mask.mask if dense else None
        if dense and (type(allowed) is not Tensor or is_lazy_copy(allowed)):
            return careful(q, k, v, mask, bias, sinks)
        try:
            terms, held = ((), None) if read is None else read(mask, q, k)
        except ValueError:  # lengths of another kind of array, or a mask that is none of terms
            return careful(q, k, v, mask, bias, sinks)
        call = _Call(form, terms, held, None if dense else mask, constants)
        try:
            return attend(q, k, v, call, allowed, *(held or ()))
        except _Unreadable:
            return careful(q, k, v, mask, bias, sinks)

    return kernel
