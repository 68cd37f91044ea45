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

from polyattn import scopes
from polyattn.biases import Bias
from polyattn.errors import InvalidProblem
from polyattn.masks import Mask, Or, Packed
from polyattn.payload import shape_of
from polyattn.problem import MaskFacts, Problem
from polyattn.simplify import simplify
from polyattn.torch.empty import answer_empty
from polyattn.torch.masking import bind_mask, check_bias, check_mask
from polyattn.torch.resolve import Plan, plan_for, wishes

__all__ = ["attention"]


class _Kernels:
    """One attribute for each kernel: compilers guard the one that is read, not the others."""


_plans: dict[int, Plan] = {}
_kernels = _Kernels()
_numbers: dict[Any, int] = {}
_state, _local = scopes.state, scopes.local


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, scale: Any, softcap: Any, sinks: Any,
    dropout_p: float, layout: str, return_lse: bool, deterministic: Any, backend: Any,
    layer: tuple[str, ...] | None = None,
) -> Any:  # fmt: skip
    """Trace one call; the arguments are those of :func:`polyattn.torch.attention`."""
    kind = q.device.type
    if q.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        cast = torch.get_autocast_dtype(kind)
        q, k, v = q.to(cast), k.to(cast), v.to(cast)
    sizes = _sizes(q, k, v, layout, mask)
    if mask is not None and layout != "packed":
        mask = simplify(mask, sizes.q_len, sizes.kv_len)
    if mask is not None:
        mask = bind_mask(mask, q.device)
        check_mask(mask, sizes)
    if bias is not None:
        _check_type("bias", bias, Bias)
        check_bias(bias, sizes, q.device)
    grad = torch.is_grad_enabled()
    scope = _state.scope
    number = _resolve(
        _class(sizes.batch), *_classes(sizes.q_len, sizes.kv_len), _exact(sizes.heads),
        _exact(sizes.kv_heads), _exact(q.shape[-1]), _exact(v.shape[-1]), q.dtype, kind, layout,
        None if mask is None else mask.signature, None if mask is None else mask.align,
        None if bias is None else bias.signature,
        grad and bias is not None and bias.payload.requires_grad, _text(scale), _text(softcap),
        _sink_count(sinks), grad and sinks is not None and sinks.requires_grad, _text(dropout_p),
        grad and (q.requires_grad or k.requires_grad or v.requires_grad), return_lse,
        deterministic, torch.are_deterministic_algorithms_enabled(),
        q.stride(-1) == 1 and k.stride(-1) == 1 and v.stride(-1) == 1, backend,
        None if scope is _state else scope, _local.traced, _local.module, _state.forced,
        layer, _state.epoch,
    )  # fmt: skip
    if sizes.batch == 0 or sizes.q_len == 0 or sizes.kv_len == 0:
        return answer_empty(layout, return_lse, q, k, v, sinks)
    if _state.recorder is not _state:
        torch.ops.polyattn.note(number)
    return getattr(_kernels, f"number_{number}")(q, k, v, mask, bias, sinks)


class _Sizes(NamedTuple):
    """The sizes of one call, some of them symbolic."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    layout: str


def _sizes(q: Tensor, k: Tensor, v: Tensor, layout: str, mask: Any) -> _Sizes:
    """Check the shapes and return what they mean; a wrong call raises InvalidProblem."""
    if mask is not None:
        _check_type("mask", mask, Mask)
    if layout not in ("BTNH", "BNTH", "packed"):
        raise InvalidProblem(f"got layout={layout!r}, expected BTNH, BNTH or packed.")
    rank = 3 if layout == "packed" else 4
    if q.dim() == k.dim() == v.dim() == rank:
        t, n = {"BTNH": (1, 2), "BNTH": (2, 1), "packed": (0, 1)}[layout]
        alike = k.shape[:-1] == v.shape[:-1] and q.shape[-1] == k.shape[-1]
        if (
            alike
            and (layout == "packed" or q.shape[0] == k.shape[0])
            and q.dtype == k.dtype == v.dtype
        ):
            batch = q.shape[0]
            if layout == "packed":
                batch = _sequences(mask)
            return _Sizes(batch, q.shape[n], k.shape[n], q.shape[t], k.shape[t], layout)
    raise InvalidProblem(
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


def _class(size: int) -> int:
    """Round up to a power of two by comparisons only, which guard a range of a symbolic size."""
    if size <= 1:
        return size
    bound = 2
    while bound < size:
        bound *= 2
    return bound


def _exact(size: int) -> int:
    """Return the size as a constant, by comparisons: heads and dims are specialised."""
    low, high = 0, _class(size)
    while low < high:
        middle = (low + high) // 2
        if size <= middle:
            high = middle
        else:
            low = middle + 1
    return low


def _classes(q_len: int, kv_len: int) -> tuple[int, int]:
    """Return the classes of both lengths, in the order that the lengths have."""
    if q_len == kv_len:
        bound = _class(q_len)
        return bound, bound
    t, s = _class(q_len), _class(kv_len)
    if t == s:
        return (t * 2, s) if q_len > kv_len else (t, s * 2)
    return t, s


def _text(number: Any) -> str:
    """Return a number as text: the one form in which a compiler specialises a symbolic float."""
    return "" if number is None else float(number).hex()


def _number(text: str) -> float | None:
    return float.fromhex(text) if text else None


def _sink_count(sinks: Any) -> int:
    if sinks is None:
        return 0
    return 1 if sinks.dim() == 1 else sinks.shape[1]


def _resolve(
    batch: int, q_len: int, kv_len: int, heads: int, kv_heads: int, head_dim: int, value_dim: int,
    dtype: torch.dtype, device: str, layout: str, mask: str | None, align: str | None,
    bias: str | None, bias_grad: bool, scale: str, softcap: str, sinks: int,
    sinks_grad: bool, dropout_p: str, grad: bool, lse: bool, deterministic: bool | None,
    globally_deterministic: bool, contiguous: bool, backend: Any, scope: str | None,
    traced: str | None, module: str | None, forced: str | None, layer: tuple[str, ...] | None,
    epoch: str,
) -> int:  # fmt: skip
    """Choose a backend from constants; returns the number of its plan."""
    from polyattn.torch.door import dtype_name

    _define_note()
    arch = None
    if device == "cuda" and torch.cuda.is_available():
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    problem = Problem(
        batch=batch, q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, value_dim=value_dim, dtype=dtype_name(dtype), device=device, arch=arch,
        layout=layout, mask=None if mask is None else MaskFacts.parse(mask, align), bias=bias,
        bias_grad=bias_grad, scale=_number(scale), softcap=_number(softcap), sinks=sinks,
        sinks_grad=sinks_grad, dropout_p=float.fromhex(dropout_p), grad=grad, lse=lse,
        deterministic=globally_deterministic if deterministic is None else deterministic,
        contiguous=contiguous, compiled=True,
    )  # fmt: skip
    key = (problem, backend, scope, traced, module, forced, layer, epoch)
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
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    @torch.library.custom_op("polyattn::note", mutates_args=())
    def note(number: int) -> None:
        for ran in scopes.recording.get(()):
            ran.append(_plans[number].selection)

    note.register_fake(lambda number: None)
    _register_effectful_op(torch.ops.polyattn.note.default, _EffectType.ORDERED)
