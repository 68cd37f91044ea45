"""Which calls of torch's scaled_dot_product_attention polyattn models; the others stay torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.torch.dispatch import PLAIN

__all__ = ["beyond", "shapes_beyond"]


def beyond(
    q: Any, k: Any, v: Any, mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any
) -> str | None:
    """Say why polyattn leaves a call to torch, or None."""
    for x in (q, k, v, *(() if mask is None else (mask,))):
        if type(x) not in PLAIN:
            return f"a tensor of type {type(x).__name__}"
        if x.is_nested or x.layout != torch.strided or x.device.type not in ("cpu", "cuda"):
            return f"a {x.layout} tensor on {x.device.type}"
    if torch._C._are_functorch_transforms_active():
        return "a function transform (torch.func) is active"
    if not (q.dim() == k.dim() == v.dim() and q.dim() >= 3):
        return f"inputs of {q.dim()}, {k.dim()} and {v.dim()} dims"
    if q.dtype != k.dtype or q.dtype != v.dtype or q.device != k.device or q.device != v.device:
        return "inputs of several dtypes or devices"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return f"inputs of dtype {q.dtype}"
    if shapes_beyond(q, k, v, gqa):
        return f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}, enable_gqa={gqa}"
    numbers = [dropout_p, *([] if scale is None else [scale])]
    if any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in numbers):
        return "a dropout_p or scale that is no Python number"
    if not 0.0 <= dropout_p <= 1.0 or type(is_causal) is not bool or type(gqa) is not bool:
        return "options out of range"
    return None if mask is None else _mask_beyond(q, k, mask, is_causal)


def shapes_beyond(q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> bool:
    """Say whether the shapes are wrong, or broadcast in a way that only torch computes."""
    heads = k.shape[-3] == v.shape[-3] and (
        q.shape[-3] % max(k.shape[-3], 1) == 0
        if gqa and q.dim() >= 4
        else q.shape[-3] == k.shape[-3]
    )
    alike = q.shape[:-3] == k.shape[:-3] == v.shape[:-3] and k.shape[-2] == v.shape[-2]
    sized = min(q.shape[-1], v.shape[-1], k.shape[-3]) > 0
    return not (heads and alike and sized and q.shape[-1] == k.shape[-1])


def _mask_beyond(q: Tensor, k: Tensor, mask: Tensor, is_causal: bool) -> str | None:
    if is_causal:
        return "attn_mask beside is_causal"
    if mask.dtype not in (torch.bool, torch.float32, q.dtype) or mask.device != q.device:
        return f"an attn_mask of dtype {mask.dtype} on {mask.device}"
    if q.dim() > 4 and mask.dim() > 3:
        return f"an attn_mask of {mask.dim()} dims beside inputs of {q.dim()}"
    full = (*q.shape[:-1], k.shape[-2])
    got = (1,) * (len(full) - mask.dim()) + tuple(mask.shape)
    if mask.dim() not in range(2, len(full) + 1) or any(
        g not in (1, f) for g, f in zip(got, full, strict=True)
    ):
        return f"an attn_mask of shape {tuple(mask.shape)}"
    return None
