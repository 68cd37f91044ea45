"""``attention`` inside ``torch.compile``: the choice is made while tracing, guarded, never stale.

What is read of the surroundings are attributes that the compiler guards (see
`polyattn.scopes`). The selection itself is one function of constants. Lengths that the compiler
keeps symbolic stay so: the selection sees them rounded up to powers of two, which guards a
range, and kernels take their sizes from the tensors.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import is_autocast_enabled as _is_autocast_enabled

from polyattn import scopes
from polyattn.biases import Bias
from polyattn.errors import InvalidProblem
from polyattn.masks import Mask, Or, Packed
from polyattn.payload import shape_of
from polyattn.problem import MaskFacts, Problem
from polyattn.simplify import simplify
from polyattn.torch.empty import answer_empty
from polyattn.torch.masking import bind_mask, check_bias, check_mask
from polyattn.torch.resolve import Plan, plan_for, present_device, wishes

__all__ = ["attention"]


class _Kernels:
    """One attribute for each kernel: compilers guard the one that is read, not the others."""


_kernels = _Kernels()
_plans: dict[int, Plan] = {}
_numbers: dict[Any, int] = {}
_state, _local = scopes.state, scopes.local


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, scale: Any, softcap: Any, sinks: Any,
    dropout_p: float, layout: str, return_lse: bool, deterministic: Any, backend: Any,
    layer: tuple[str, ...] | None,
) -> Any:  # fmt: skip
    """Trace one call; the arguments are those of :func:`polyattn.torch.attention`."""
    if q.element_size() != 8 and _is_autocast_enabled(q.device.type):  # not float64
        q, k, v = _autocast(q, k, v)
    sizes, constants = _measure(q, k, v, layout, mask)
    if mask is not None:
        mask = _bound_mask(mask, sizes, layout, q.device)
    if bias is not None:
        _check_type("bias", bias, Bias)
        check_bias(bias, _Sizes(*sizes, layout), q.device)
    scope = _state.scope
    number = _resolve(
        *constants, q.dtype, q.device.type, layout,
        None if mask is None else mask.signature, None if mask is None else mask.align,
        None if bias is None else bias.signature, bias is not None and bias.payload.requires_grad,
        # as text: the one form in which a compiler specialises a float that it holds symbolic
        "" if scale is None else (scale * 1.0).hex(),
        "" if softcap is None else (softcap * 1.0).hex(),
        0 if sinks is None else 1 if sinks.dim() == 1 else sinks.shape[1],
        sinks is not None and sinks.requires_grad, (dropout_p * 1.0).hex(),
        q.requires_grad or k.requires_grad or v.requires_grad, return_lse, deterministic,
        q.stride(-1) == 1 and k.stride(-1) == 1 and v.stride(-1) == 1, backend,
        None if scope is _state else scope, _local.traced, _local.module, layer, _state.epoch,
    )  # fmt: skip
    if sizes[0] == 0 or sizes[3] == 0 or sizes[4] == 0:
        return answer_empty(layout, return_lse, q, k, v, sinks, bias)
    recorded = _state.recorded
    if recorded is not _state and recorded != "":
        torch.ops.polyattn.note(number)
    return getattr(_kernels, f"number_{number}")(q, k, v, mask, bias, sinks)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    cast = torch.get_autocast_dtype(q.device.type)
    return q.to(cast), k.to(cast), v.to(cast)


def _bound_mask(
    mask: Mask, sizes: tuple[int, int, int, int, int], layout: str, device: Any
) -> Mask | None:
    simple: Mask | None = mask
    if layout != "packed":
        simple = simplify(mask, sizes[3], sizes[4])
    if simple is not None:
        simple = bind_mask(simple, device)
        check_mask(simple, _Sizes(*sizes, layout))
    return simple


class _Sizes(NamedTuple):
    """The sizes of one call, some of them symbolic."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    layout: str


def _measure(
    q: Tensor, k: Tensor, v: Tensor, layout: str, mask: Any
) -> tuple[tuple[int, int, int, int, int], tuple[int, int, int, int, int, int, int]]:
    """Check the shapes; return B, N, K, T, S as they are, and B, T, S, N, K, H, V as constants.

    Its functions are nested ones because a compiler guards every global function, at each call.
    """

    def round_up(size: int) -> int:
        # by comparisons only, which guard a range of a symbolic size
        bound = 1
        while bound < size:
            bound *= 2
        return bound if size else 0

    def exact(size: int) -> int:
        low, high = 0, round_up(size)
        while low < high:
            middle = (low + high) // 2
            if size <= middle:
                high = middle
            else:
                low = middle + 1
        return low

    if mask is not None:
        _check_type("mask", mask, Mask)
    rank = {"BTNH": 4, "BNTH": 4, "packed": 3}.get(layout)
    alike = q.dim() == k.dim() == v.dim() == rank and q.dtype == k.dtype == v.dtype
    alike = alike and k.shape[:-1] == v.shape[:-1] and q.shape[-1] == k.shape[-1]
    alike = alike and (layout == "packed" or q.shape[0] == k.shape[0])
    if alike:
        t, n = {"BTNH": (1, 2), "BNTH": (2, 1), "packed": (0, 1)}[layout]
        b = _sequences(mask) if layout == "packed" else q.shape[0]
        q_len, kv_len = q.shape[t], k.shape[t]
        # the classes of the lengths keep the order that the lengths have
        t_class, s_class = round_up(q_len), round_up(kv_len)
        if t_class == s_class and q_len != kv_len:
            t_class, s_class = (t_class * 2, s_class) if q_len > kv_len else (t_class, s_class * 2)
        heads = exact(q.shape[n]), exact(k.shape[n]), exact(q.shape[-1]), exact(v.shape[-1])
        return (b, q.shape[n], k.shape[n], q_len, kv_len), (
            round_up(b),
            t_class,
            s_class,
            *heads,
        )
    raise _misfit(q, k, v, layout)


def _misfit(q: Tensor, k: Tensor, v: Tensor, layout: str) -> InvalidProblem:
    return InvalidProblem(
        f"got query {tuple(q.shape)} {q.dtype}, key {tuple(k.shape)} {k.dtype}, value "
        f"{tuple(v.shape)} {v.dtype}, expected one dtype and shapes that fit, laid out as {layout}."
    )


def _sequences(mask: Any) -> int:
    packed = (
        [leaf for leaf in mask.leaves() if isinstance(leaf, Packed)] if mask is not None else []
    )
    if len(packed) != 1 or isinstance(mask, Or):
        raise InvalidProblem(
            'got layout="packed" without exactly one Packed(cu_q, cu_kv) joined by &, expected it.'
        )
    return shape_of(packed[0].cu_q)[0] - 1


def _check_type(name: str, value: Any, expected: type) -> None:
    if not isinstance(value, expected):
        raise InvalidProblem(
            f"got {name} of type {type(value).__name__}, expected a polyattn {expected.__name__}; "
            "wrap arrays as polyattn.Dense(...) or polyattn.DenseBias(...)."
        )


def _number(text: str) -> float | None:
    return float.fromhex(text) if text else None


def _resolve(
    batch: int, q_len: int, kv_len: int, heads: int, kv_heads: int, head_dim: int, value_dim: int,
    dtype: torch.dtype, device: str, layout: str, mask: str | None, align: str | None,
    bias: str | None, bias_grad: bool, scale: str, softcap: str, sinks: int, sinks_grad: bool,
    dropout_p: str, grad: bool, lse: bool, deterministic: bool | None, contiguous: bool,
    backend: Any, scope: str | None, traced: str | None, module: str | None,
    layer: tuple[str, ...] | None, epoch: str,
) -> int:  # fmt: skip
    """Choose a backend from constants; returns the number of its plan.

    Grad mode and determinism are read here, as they stand while tracing: they are among the
    global states that compiled code guards anyway. So is what is forced, by its epoch.
    """
    from polyattn.torch.door import dtype_name

    _define_note()
    trains = torch.is_grad_enabled()
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    problem = Problem(
        batch=batch, q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, value_dim=value_dim, dtype=dtype_name(dtype), device=device,
        arch=present_device()[1] if device == "cuda" else None, layout=layout,
        mask=None if mask is None else MaskFacts.parse(mask, align), bias=bias,
        bias_grad=trains and bias_grad, scale=_number(scale), softcap=_number(softcap),
        sinks=sinks, sinks_grad=trains and sinks_grad, dropout_p=float.fromhex(dropout_p),
        grad=trains and grad, lse=lse, deterministic=deterministic, contiguous=contiguous,
        compiled=True,
    )  # fmt: skip
    key = (problem, backend, scope, traced, module, layer, epoch)
    if key not in _numbers:
        wanted = wishes(backend, None, traced if traced is not None else scope, module)
        if layer is not None and not wanted.ordered():
            wanted = replace(wanted, layer=frozenset(layer))
        plan = plan_for(problem, wanted)
        number = len(_plans)
        _plans[number] = plan
        setattr(_kernels, f"number_{number}", plan.kernel)
        _numbers[key] = number
    return _numbers[key]


# what torch.compiler.assume_constant_result sets, without importing the whole compiler for it
_resolve._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _define_note() -> None:
    """Define the operator that notes a call each time a compiled graph runs.

    It is an effect: compilers neither drop nor reorder it. Defined when something is first
    traced, since defining it imports much of the compiler.
    """

    @torch.library.custom_op("polyattn::note", mutates_args=())
    def note(number: int) -> None:
        for ran in scopes.recording.get(()):
            ran.append(_plans[number].selection)

    note.register_fake(lambda number: None)
    try:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
    except ImportError:  # another torch: recorders then see eager calls only
        return
    _register_effectful_op(torch.ops.polyattn.note.default, _EffectType.ORDERED)
