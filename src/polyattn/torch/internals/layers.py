"""The fused paths of torch's attention layers in inference, and strided nested tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from polyattn.torch.internals.private_names import MISSING, noted

__all__ = ["fused_attention", "fused_encoder_layer", "nested_rows", "rows_like"]

_ROUTED = "the fused path of the layer is not routed, and not told either"
_ATTENTION = noted("torch._native_multi_head_attention", _ROUTED)
_ENCODER = noted("torch._transformer_encoder_layer_fwd", _ROUTED)


def fused_attention() -> Callable[..., Any] | None:
    """Return what nn.MultiheadAttention calls in inference at present; None if torch has none."""
    found = _ATTENTION.find()
    return None if found is MISSING else found


def fused_encoder_layer() -> Callable[..., Any] | None:
    """Return what nn.TransformerEncoderLayer calls in inference at present, or None."""
    found = _ENCODER.find()
    return None if found is MISSING else found


_LEFT = "fused paths on nested tensors are left to torch"
_SIZES = noted("torch.Tensor._nested_tensor_size", _LEFT)
_STRIDES = noted("torch.Tensor._nested_tensor_strides", _LEFT)
_OFFSETS = noted("torch.Tensor._nested_tensor_storage_offsets", _LEFT)
_VIEW = noted("torch._nested_view_from_buffer", _LEFT)


def nested_rows(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the rows (total, D) of a strided nested tensor (B, j, D), and the lengths (B,).

    None where it is not one block of rows, or torch does not say how it lies.
    """
    if any(row.find() is MISSING for row in (_SIZES, _STRIDES, _OFFSETS, _VIEW)):
        return None
    if x.dim() != 3 or not x.is_contiguous():
        return None
    sizes: Tensor = getattr(x, _SIZES.name)()
    lengths, widths = sizes.unbind(1)
    width = int(widths[0]) if len(widths) else 0
    if not width or not bool((widths == width).all()):
        return None
    return x.values().view(-1, width), lengths


def rows_like(rows: Tensor, x: Tensor) -> Tensor:
    """Return rows (total, D) as a strided nested tensor that lies as `x` does."""
    view: Any = _VIEW.find()
    facts = (getattr(x, row.name)() for row in (_SIZES, _STRIDES, _OFFSETS))
    return view(rows.contiguous().view(-1), *facts)  # type: ignore[no-any-return]
