"""The door: whatever a caller hands over is checked here once and becomes a Problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyattn import fit
from polyattn.biases import Bias
from polyattn.errors import InvalidProblem
from polyattn.masks import Mask
from polyattn.problem import LAYOUTS, MaskFacts, Problem
from polyattn.simplify import simplify
from polyattn.torch.masking import bind_mask, check_bias, check_mask

__all__ = ["Call", "admit", "dtype_name", "rebind"]

_DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}


@dataclass(frozen=True)
class Call:
    """A checked call: its problem, and its mask, bias and sinks as tensors on the device."""

    problem: Problem
    mask: Mask | None
    bias: Bias | None
    sinks: Tensor | None
    cast: torch.dtype | None  # what autocast turns the inputs into
    masked: bool  # a mask was given, though it may have been simplified away


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``; raise for what is not a float type of ours."""
    if dtype not in _DTYPES:
        raise InvalidProblem(
            f"got query of dtype {dtype}, expected one of {', '.join(map(str, _DTYPES))}."
        )
    return _DTYPES[dtype]


def admit(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, scale: Any = None,
    softcap: Any = None, sinks: Any = None, dropout_p: Any = 0.0, layout: Any = "BTNH",
    return_lse: bool = False, deterministic: bool | None = None,
) -> Call:  # fmt: skip
    """Check a call of :func:`polyattn.torch.attention`; raise :class:`InvalidProblem`."""
    shapes, masked = _shapes(q, k, v, layout), mask is not None
    _types(mask, bias, scale, softcap, sinks, dropout_p)
    device = q.device
    cast = _autocast(q)
    dtype = dtype_name(cast or q.dtype)
    batch, q_len, heads, kv_len, kv_heads, head_dim, value_dim = shapes
    if layout == "packed":
        batch = fit.packed_sequences(mask)
    elif mask is not None:
        mask = simplify(mask, q_len, kv_len)
    tensors = [x for x in (q, k, v) if x.requires_grad] if torch.is_grad_enabled() else []
    if mask is not None:
        mask = bind_mask(mask, device)
    problem = Problem(
        batch=batch, q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, value_dim=value_dim, dtype=dtype, device=device.type,
        arch=_arch(device), layout=layout, mask=MaskFacts.of(mask),
        bias=None if bias is None else bias.signature, bias_grad=_wants_grad(bias),
        scale=None if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        sinks=_sinks(sinks, heads, device), sinks_grad=_wants_grad(sinks),
        dropout_p=float(dropout_p), grad=bool(tensors), lse=bool(return_lse),
        deterministic=_deterministic(deterministic),
        contiguous=all(map(_is_contiguous, (q, k, v))),
        compiled=torch.compiler.is_compiling(),
    )  # fmt: skip
    if mask is not None:
        check_mask(mask, problem)
    if bias is not None:
        check_bias(bias, problem, device)
    return Call(problem, mask, bias, sinks, cast, masked)


def rebind(mask: Mask, problem: Problem, device: torch.device) -> Mask:
    """Bind the mask of a further call of the same class; its arrays may hold other values."""
    if problem.layout != "packed":
        simple = simplify(mask, problem.q_len, problem.kv_len)
        mask = mask if simple is None else simple
    bound = bind_mask(mask, device)
    check_mask(bound, problem)
    return bound


def _shapes(q: Any, k: Any, v: Any, layout: Any) -> tuple[int, ...]:
    if layout not in LAYOUTS:
        raise InvalidProblem(f"got layout={layout!r}, expected one of {', '.join(LAYOUTS)}.")
    rank = 3 if layout == "packed" else 4
    letters = "(total, N, H)" if layout == "packed" else f"({', '.join(layout)})"
    for name, x in (("query", q), ("key", k), ("value", v)):
        if not isinstance(x, Tensor):
            raise InvalidProblem(f"got {name} of type {type(x).__name__}, expected a torch.Tensor.")
        if x.is_nested or x.layout != torch.strided:
            raise InvalidProblem(
                f"got a nested or sparse {name}, expected a strided tensor; pass packed rows with "
                'layout="packed" and Packed(cu_q, cu_kv).'
            )
        if x.dim() != rank:
            raise InvalidProblem(
                f"got {name} of shape {tuple(x.shape)}, expected {rank} dims {letters} for "
                f"layout={layout!r}."
            )
    for name, x in (("key", k), ("value", v)):
        if x.dtype != q.dtype or x.device != q.device:
            raise InvalidProblem(
                f"got {name} {x.dtype} on {x.device} with query {q.dtype} on {q.device}, expected "
                "one dtype and one device; cast or move it."
            )
    return fit.lengths_of(q.shape, k.shape, v.shape, layout)


def _types(mask: Any, bias: Any, scale: Any, softcap: Any, sinks: Any, dropout_p: Any) -> None:
    if mask is not None and not isinstance(mask, Mask):
        hint = (
            "wrap it as polyattn.Dense(mask)" if isinstance(mask, Tensor) else "see polyattn.masks"
        )
        raise InvalidProblem(f"got mask of type {type(mask).__name__}, expected a Mask; {hint}.")
    if bias is not None and not isinstance(bias, Bias):
        hint = (
            "wrap it as polyattn.DenseBias(bias)"
            if isinstance(bias, Tensor)
            else "see polyattn.biases"
        )
        raise InvalidProblem(f"got bias of type {type(bias).__name__}, expected a Bias; {hint}.")
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None:
            fit.check_number(name, number)
    fit.check_number("dropout_p", dropout_p)
    if sinks is not None and not isinstance(sinks, Tensor):
        raise InvalidProblem(f"got sinks of type {type(sinks).__name__}, expected a torch.Tensor.")


def _is_contiguous(x: Tensor) -> bool:
    """Say whether the last dim lies in memory as its values count (negated views do not)."""
    return (x.stride(-1) == 1 or x.shape[-1] <= 1) and not x.is_neg()


def _sinks(sinks: Tensor | None, heads: int, device: torch.device) -> int:
    if sinks is None:
        return 0
    fit.check_sinks_shape(tuple(sinks.shape), heads)
    if not sinks.is_floating_point() or sinks.device != device:
        raise InvalidProblem(
            f"got sinks {sinks.dtype} on {sinks.device}, expected floating point on {device}."
        )
    return 1 if sinks.dim() == 1 else sinks.shape[1]


def _wants_grad(holder: Any) -> bool:
    array = getattr(holder, "payload", holder)
    return torch.is_grad_enabled() and isinstance(array, Tensor) and array.requires_grad


def _autocast(q: Tensor) -> torch.dtype | None:
    kind = q.device.type
    if q.dtype == torch.float64 or kind not in ("cpu", "cuda"):
        return None
    if not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    return None if dtype == q.dtype else dtype


def _deterministic(asked: bool | None) -> bool:
    if asked is None:
        return torch.are_deterministic_algorithms_enabled()
    return bool(asked)


def _arch(device: torch.device) -> str | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
