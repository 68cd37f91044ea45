"""The arguments of a recorded call, made again: same shapes, strides, masks, gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import TuningError
from polyattn.integrations.program.asked import Case
from polyattn.masks import Mask
from polyattn.masks.biases import Bias
from polyattn.measure.signatures import bias_like, mask_like
from polyattn.problem import Problem
from polyattn.selection.platforms import platform_of
from polyattn.torch.admission import admit

__all__ = ["Inputs", "build"]

_MOST_GAPS = 16


@dataclass(frozen=True)
class Inputs:
    """A checked call. `mask` and `bias` are on the device; `grad_out` is the incoming gradient.

    Of a call of JAX they are tensors on the CPU: the truth is computed of them, and the candidates
    get them as JAX's arrays (`measure/jax_runs.py`).
    """

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    bias: Bias | None
    sinks: Tensor | None
    grad_out: Tensor

    @property
    def trains(self) -> bool:
        """Whether a backward pass belongs to the call."""
        return self.problem.grad or self.problem.bias_grad

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that want gradients, by name."""
        payload = None if self.bias is None else self.bias.payload
        every = {"query": self.q, "key": self.k, "value": self.v, "bias": payload}
        return {name: x for name, x in every.items() if x is not None and x.requires_grad}


def build(case: Case, seed: int = 0) -> Inputs:
    """Make the call of `case` again; TuningError where that cannot be done here."""
    problem = case.problem
    _check_device(problem)
    if problem.sinks_grad:
        raise TuningError("got sinks that need a gradient, which tuning does not rebuild.")
    if problem.paged is not None:
        raise TuningError("got keys in pages, which tuning does not rebuild.")
    if problem.quantized is not None:
        raise TuningError("got quantised keys, which tuning does not rebuild.")
    generator = torch.Generator().manual_seed(seed)
    device = torch.device(problem.device if problem.framework == "torch" else "cpu")
    dtype = getattr(torch, problem.dtype)
    wants = case.needs_grad if any(case.needs_grad) else (problem.grad,) * 3
    q, k, v = (
        _tensor(shape, strides, dtype, generator).to(device).requires_grad_(wanted and problem.grad)
        for shape, strides, wanted in zip(_shapes(problem), _strides(case), wants, strict=True)
    )
    real = None if case.attn_mask is None else case.attn_mask.restore()
    mask = mask_like(problem, real, generator)
    bias = bias_like(problem, real, generator)
    if bias is not None:
        bias = bias.map(lambda _, x: x.to(device).requires_grad_(problem.bias_grad))
    sinks = None
    if problem.sinks:
        sinks = torch.randn((problem.heads, problem.sinks), generator=generator).to(device)
    with torch.set_grad_enabled(problem.grad or problem.bias_grad):
        call = admit(
            q, k, v, mask=mask, bias=bias, scale=problem.scale, softcap=problem.softcap,
            sinks=sinks, dropout_p=problem.dropout_p, layout=problem.layout,
            return_lse=problem.lse, deterministic=problem.deterministic,
        )  # fmt: skip
    grad_out = torch.randn(_out_shape(problem), generator=generator).to(device, dtype)
    checked = call.problem
    if problem.framework != "torch":  # by the same rules; what is said of tensors is not theirs
        checked = problem.with_(compiled=False)
    return Inputs(checked, q, k, v, call.mask, call.bias, call.sinks, grad_out)


def _check_device(problem: Problem) -> None:
    if problem.framework == "torch":
        if problem.device == "cuda" and not torch.cuda.is_available():
            raise TuningError("got a problem on cuda, but torch sees no CUDA device here.")
        return
    here = platform_of(problem.framework).present_device()[0]
    if problem.device != here:
        raise TuningError(
            f"got a problem of {problem.framework} on {problem.device}, expected one on {here}, "
            "where it puts arrays here."
        )
    if problem.dtype == "float64":
        raise TuningError("got a problem of jax in float64, which tuning does not rebuild.")
    if problem.spread is not None:
        raise TuningError("got a sequence that is spread over devices, which tuning cannot have.")


def _shapes(p: Problem) -> tuple[tuple[int, ...], ...]:
    def arranged(heads: int, length: int, dim: int) -> tuple[int, ...]:
        if p.layout == "packed":
            return length, heads, dim
        middle = (length, heads) if p.layout == "BTNH" else (heads, length)
        return (p.batch, *middle, dim)

    return (
        arranged(p.heads, p.q_len, p.head_dim),
        arranged(p.kv_heads, p.kv_len, p.head_dim),
        arranged(p.kv_heads, p.kv_len, p.value_dim),
    )


def _out_shape(p: Problem) -> tuple[int, ...]:
    return (*_shapes(p)[0][:-1], p.value_dim)


def _strides(case: Case) -> tuple[tuple[int, ...] | None, ...]:
    return case.strides if case.strides is not None else (None, None, None)


def _tensor(
    shape: tuple[int, ...], strides: Any, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Return random numbers with the recorded strides, or contiguous where those make no sense."""
    plain = torch.randn(shape, generator=generator).to(dtype)
    if strides is None:
        return plain
    if len(strides) == len(shape) - 1:  # a call without batch dim
        strides = (shape[-1], *strides)
    if len(strides) != len(shape):
        return plain
    needed = 1 + sum(
        (size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size
    )
    if not plain.numel() or needed > _MOST_GAPS * plain.numel():
        return plain
    storage = torch.randn(needed, generator=generator).to(dtype)
    return storage.as_strided(shape, strides)
