"""The short ways to torch's CUDA kernels: calls without a mask, or causal ones, as most are.

A kernel of 20 us on the device waits for the host where the way to it is longer. What is unusual
here, by how its tensors lie in memory, goes the careful way of `lowering`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.backends.sdpa.torch.cuda_memory import APART, comes_in_like
from polyattn.backends.sdpa.torch.short_ways import is_square_causal
from polyattn.problem import Problem
from polyattn.torch.internals import (
    cudnn_binding,
    efficient_binding,
    flash_binding,
    is_exported,
    is_grad_enabled,
)

__all__ = ["FINE", "lies", "short_way"]

Kernel = Callable[..., Any]
FINE = {torch.float32: 3, torch.float16: 7, torch.bfloat16: 7}
"""The bits of a stride that are zero where rows begin at multiples of 16 bytes."""
_FEW_ROWS = 32  # from which on the flash kernel is given the heads of a group as they are


def short_way(backend: str, problem: Problem, careful: Kernel) -> Kernel:
    """Return the kernel of a problem: a short way where there is one, else the careful one."""
    if not _is_taken(backend, problem):
        return careful
    call = _CALLS[backend](problem)
    turned, fine = problem.layout == "BTNH", FINE[getattr(torch, problem.dtype)]

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        if not (lies(q, fine) and lies(k, fine) and lies(v, fine)) or is_exported():
            return careful(q, k, v, mask, bias, sinks)
        if turned:
            return call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
        return call(q, k, v)

    return kernel


def _is_taken(backend: str, p: Problem) -> bool:
    plain = p.bias is None and not p.sinks and not p.lse and p.contiguous and not p.compiled
    if not plain or p.layout == "packed" or p.dropout_p > 0:
        return False
    if p.gqa and (
        backend == "sdpa_efficient" or (backend == "sdpa_flash" and p.q_len <= _FEW_ROWS)
    ):
        return False
    return p.mask is None or is_square_causal(p)


def lies(x: Tensor, fine: int) -> bool:
    """Say whether rows of (B, ., ., H) begin at multiples of 16 bytes."""
    if type(x) not in _PLAIN:
        return False
    b, n, t, h = x.stride()
    return h == 1 and not (b | n | t) & fine and not x.data_ptr() & 15


_PLAIN = (Tensor, torch.nn.Parameter)


def _flash(p: Problem) -> Kernel:
    causal, scale = p.mask is not None, p.scale
    return lambda q, k, v: flash_binding(q, k, v, 0.0, causal, scale=scale)[0]


def _efficient(p: Problem) -> Kernel:
    causal, scale, trains = p.mask is not None, p.scale, p.grad

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lse = trains and is_grad_enabled()
        return efficient_binding(q, k, v, None, lse, 0.0, causal, scale=scale)[0]  # type: ignore[no-any-return]

    return call


def _cudnn(p: Problem) -> Kernel:
    causal, scale, trains = p.mask is not None, p.scale, p.grad

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lse = trains and is_grad_enabled()
        out: Tensor = cudnn_binding(q, k, v, None, lse, APART, causal, False, scale=scale)[0]
        return comes_in_like(out) if lse else out

    return call


_CALLS: dict[str, Callable[[Problem], Kernel]] = {
    "sdpa_flash": _flash, "sdpa_efficient": _efficient, "sdpa_cudnn": _cudnn,
}  # fmt: skip
