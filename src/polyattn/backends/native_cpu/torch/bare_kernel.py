"""The shortest way from plain tensors to the extension, which reads them by itself.

Inference in eager code: contiguous last dims, short masks, biases of one array, no sinks, no lse.
What is not plain, or what the extension refuses, goes the careful way of each kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn import settings
from polyattn.backends.native_cpu.torch.arguments import DTYPES
from polyattn.backends.native_cpu.torch.calls import Constants
from polyattn.backends.native_cpu.torch.inference import EXCHANGE
from polyattn.backends.native_cpu.torch.levels import PLAIN, WATCHERS
from polyattn.backends.native_cpu.torch.short_masks import is_short, terms_reader
from polyattn.native import module
from polyattn.native.forms import isa_for
from polyattn.problem import Problem
from polyattn.torch.internals import dual_levels, is_lazy_copy, tracing_state
from polyattn.torch.kit.plain_calls import ASKERS

__all__ = ["bare_kernel", "is_bare"]

Kernel = Callable[..., Any]

_UNREADABLE = ValueError, BufferError, RuntimeError
"""What calls end with that the extension cannot read: zeros without memory, say, which it refuses,
or codes of fp8, of which a torch may be unable to tell through its exchange."""


def is_bare(problem: Problem) -> bool:
    """Say whether the extension reads all there is from the tensors."""
    extra = problem.sinks or problem.lse or problem.grad or problem.bias_grad or problem.sinks_grad
    plainest = problem.contiguous and problem.layout != "packed" and not extra
    bias = problem.bias_structure
    readable = bias is None or (bias.kind == "DenseBias" and problem.quantized is None)
    return plainest and readable and is_short(problem) and EXCHANGE is not None


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


def _looks(problem: Problem) -> bool:
    """Say whether a bias may be a mask, which lets tiles be skipped and pays for looking at it."""
    return problem.mask is None and min(problem.q_len, problem.kv_len) >= _MANY


def _arrays_of(problem: Problem) -> Callable[..., Any] | None:
    """Return what gives the arrays of mask and bias for the extension; None where there are none.

    ``arrays(mask, bias, q, k, v)``: booleans and numbers to add; ValueError for what the extension
    cannot read.
    """
    dense, lazy = problem.mask is not None and "Dense" in problem.mask.kinds, is_lazy_copy
    if not dense and problem.bias is None:
        return None
    many = _looks(problem)

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


def bare_kernel(problem: Problem, constants: Constants, careful: Kernel) -> Kernel:
    """Return ``kernel(q, k, v, mask, bias, sinks, *held)`` for problems that :func:`is_bare` knows.

    All that the problem fixes is made here once; the extension asks the tensors for the rest, and
    for their batch and lengths, in which a problem stands for others. `held`, of keys as codes:
    (key_scales, value_scales, block_size), and of keys in pages: (block_table, lengths).
    """
    native = _native()
    if native is not None:
        return native(_parts(problem, constants, careful))  # type: ignore[no-any-return]
    return _in_python(problem, constants, careful)


def _native() -> Callable[..., Any] | None:
    """Return the extension's class of such calls; None where the environment is no dictionary."""
    made: Callable[..., Any] | None = getattr(module.load(), "BareCall", None)
    return made if isinstance(getattr(settings.raw, "__self__", None), dict) else None


def _parts(problem: Problem, constants: Constants, careful: Kernel) -> tuple[Any, ...]:
    """Return what the class of the extension is made of, in the order of BarePart."""
    code, (layout, scale, softcap) = DTYPES[getattr(torch, problem.dtype)], constants
    variable, raw = settings.NATIVE_ISA, settings.raw
    environ: Any = getattr(raw, "__self__", None)
    form = functools.partial(isa_for, code, problem.q_len, problem.heads, problem.kv_heads)
    return (
        careful, EXCHANGE, (Tensor, torch.nn.Parameter), ASKERS, tracing_state, dual_levels,
        is_lazy_copy, torch.get_num_threads, torch.empty_like, terms_reader(problem, layout),
        _arrays_of(problem), _looks(problem), _are_plain, form(), form, environ, variable,
        raw(variable), code, layout == "BTNH", problem.value_dim == problem.head_dim,
        problem.value_dim, problem.paged is not None, scale, softcap,
    )  # fmt: skip


def _in_python(problem: Problem, constants: Constants, careful: Kernel) -> Kernel:
    """Return what the class of the extension does, where that has none."""
    code, (layout, scale, softcap) = DTYPES[getattr(torch, problem.dtype)], constants
    rows_first, paged, last = layout == "BTNH", problem.paged is not None, problem.value_dim
    alike, arrays = last == problem.head_dim, _arrays_of(problem)
    run, threads, plain = module.load().forward_tensors, torch.get_num_threads, PLAIN
    functorch, modes, recorded, tracing = WATCHERS  # in cells: quicker than globals
    raw, variable, lazy, exchange = settings.raw, settings.NATIVE_ISA, is_lazy_copy, EXCHANGE
    rows = code, problem.q_len, problem.heads, problem.kv_heads  # few or many, as all of a class
    asked, place, empty_like = raw(variable), isa_for(*rows), torch.empty_like
    read = terms_reader(problem, layout)

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None,
        *held: Any,
    ) -> Any:  # fmt: skip
        if (
            not (type(q) in plain and type(k) in plain and type(v) in plain)
            or (functorch() or modes() or recorded() or tracing() is not None)
            or dual_levels._current_level >= 0
            or (lazy(q) or lazy(k) or lazy(v))
            or (held and not _are_plain(*held[0][:2]))
        ):
            return careful(q, k, v, mask, bias, sinks, *held)
        out = empty_like(q) if alike and (q.is_contiguous() or not rows_first) else None
        if out is None or out.stride(3) != 1:  # that of rows that overlap may be another
            out = q.new_empty((*q.shape[:3], last))
        isa = place if raw(variable) is asked else isa_for(*rows)
        codes, pages = (None, *held) if paged else (*held, None) if held else (None, None)
        try:
            terms, _held = ((), None) if read is None else read(mask, q, k)
            allowed, added = (None, None) if arrays is None else arrays(mask, bias, q, k, v)
            run(
                exchange, isa, threads(), code, rows_first, scale, softcap, q, k, v, out, terms,
                allowed, added, codes, pages,
            )  # fmt: skip
        except _UNREADABLE:  # the other way knows, or says what is wrong
            return careful(q, k, v, mask, bias, sinks, *held)
        return out

    return kernel


def _are_plain(*tensors: Any) -> bool:
    """Say whether all are tensors whose memory holds what they count as."""
    return all(type(x) in PLAIN and not is_lazy_copy(x) and not x.is_neg() for x in tensors)
