"""The four operators of torch, each behind one signature on (B, N, T, H) arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyattn.backends.sdpa.torch.cuda_memory import APART, comes_in_like, rows_in_memory
from polyattn.torch.internals import (
    cudnn_attention,
    efficient_attention,
    flash_attention,
    flash_forward,
    is_grad_enabled,
    math_attention,
)

__all__ = [
    "FEW_KEYS", "Op", "Result", "beyond_autocast", "cudnn", "efficient", "flash_cpu", "flash_cuda",
    "unfused", "windowed",
]  # fmt: skip

_LANES = {"AVX2": 8, "DEFAULT": 8}  # of what torch's kernels are compiled for, in float32

FEW_KEYS = _LANES.get(torch.backends.cpu.get_cpu_capability(), 16)
"""As many lanes as a vector of the CPU flash kernel has: it takes the maximum of fewer scores one
by one, and so that NaN is none."""

Result = tuple[Tensor, Tensor | None]
Call = Callable[..., Result]


@dataclass(frozen=True)
class Op:
    """One operator: ``call(q, k, v, mask, causal, scale, dropout_p, lse)`` on (B, N, T, H).

    `grouped`: takes fewer key/value heads as they are; `folds`: and is faster if the heads of a
    group are rows where there are few. `windows`: masks by itself, from the last key on,
    which heads as rows would mistake. `ranges`: masks by itself, given the mask.
    `zeroes_empty`: rows that see no key are 0 with gradient 0 (its lse still has to be rewritten).
    `causal_with_mask`: applies its causal flag beside a mask. `wide`: takes float32 masks
    beside half-precision inputs, and masks that broadcast. `loses_nan`: a row of less than
    FEW_KEYS keys whose scores are all NaN comes out as 0 unless there is a mask to add.
    `like_query`: the output lies in memory as the queries do. `in_vectors`: its rows have to begin
    at multiples of 16 bytes. `any_sizes`: may be traced where no
    length may be compared with another. `lse_trains`: its lse has a gradient.
    """

    call: Call
    grouped: bool = False
    folds: bool = True
    windows: bool = False
    ranges: bool = False
    zeroes_empty: bool = False
    causal_with_mask: bool = False
    wide: bool = False
    loses_nan: bool = False
    like_query: bool = False
    in_vectors: bool = False
    any_sizes: bool = False
    lse_trains: bool = False


def flash_cpu(function: Any) -> Call:
    """Return the call of FlashAttention for CPUs by one of the handles of its operator."""

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        causal: bool,
        scale: Any,
        dropout: float,
        lse: bool,
    ) -> Result:
        return function(q, k, v, dropout, causal, attn_mask=mask, scale=scale)  # type: ignore[no-any-return]

    return call


def flash_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: Any, dropout: float, lse: bool
) -> Result:
    """Call FlashAttention 2 for CUDA."""
    return flash_attention(q, k, v, dropout, causal, False, scale=scale)[:2]  # type: ignore[no-any-return]


def efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: Any, dropout: float, lse: bool
) -> Result:
    """Call the memory-efficient kernel (CUTLASS), CUDA only."""
    if mask is not None:
        mask = _aligned(mask, (*q.shape[:3], k.shape[2]))
    out, sums, *_ = efficient_attention(
        q, k, v, mask, lse or _trains(q, k, v, mask), dropout, causal, scale=scale
    )
    return out, sums[..., : q.shape[2]] if lse else None


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: Any, dropout: float, lse: bool
) -> Result:
    """Call cuDNN's fused attention, CUDA only."""
    if mask is not None:
        # heads are left to broadcast: given one by one, cuDNN takes twice as long
        mask = rows_in_memory(mask.expand(q.shape[0], -1, q.shape[2], k.shape[2]))
    out, sums, *_ = cudnn_attention(
        q, k, v, mask, lse or _trains(q, k, v), dropout or APART, causal, False, scale=scale
    )
    if not lse:
        return comes_in_like(out), None
    return comes_in_like(out), sums.squeeze(-1) if sums.dim() == 4 else sums


def beyond_autocast(call: Call) -> Call:
    """Return a call of plain operators that autocast does not make others of.

    Its inputs are what autocast makes of them already, and products of what it widened are not to
    be cast down again.
    """

    @functools.wraps(call)
    def widened(q: Tensor, *others: Any) -> Result:
        kind = q.device.type
        if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
            return call(q, *others)
        with torch.autocast(kind, enabled=False):
            return call(q, *others)

    return widened


@beyond_autocast
def unfused(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: Any, dropout: float, lse: bool
) -> Result:
    """Call the path of matmul, softmax and matmul; halves run in float32."""
    wide = q.dtype in (torch.float16, torch.bfloat16)
    out_dtype = q.dtype
    if wide:  # softmax and accumulation in float32 at least
        q, k, v = q.float(), k.float(), v.float()
    out: Tensor = math_attention(q, k, v, mask, dropout, causal, None, scale=scale)[0]
    return (out.to(out_dtype) if wide else out), None


def _trains(*tensors: Tensor | None) -> bool:
    """Say whether something wants a gradient: then the kernel has to keep the lse for it."""
    return is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def windowed(left: int | None, right: int | None) -> Call:
    """Return the call of FlashAttention 2 for CUDA that sees a window of keys, and reads no more.

    The last query stands at the last key; lengths in front of it are cut off before.
    """

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        causal: bool,
        scale: Any,
        dropout: float,
        lse: bool,
    ) -> Result:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, sums, *_ = flash_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], dropout, False, False, scale=scale,
            window_size_left=-1 if left is None else left,
            window_size_right=-1 if right is None else right,
        )  # fmt: skip
        return out.transpose(1, 2), sums

    return call


def _aligned(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Expand a mask; the memory-efficient kernel wants rows that begin at multiples of 16."""
    spare = -mask.shape[-1] % 16
    mask = rows_in_memory(mask)
    if spare:
        mask = torch.nn.functional.pad(mask, (0, spare))[..., : shape[-1]]
    return mask.expand(shape)
