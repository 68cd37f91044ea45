"""What codes of keys and values stand for: a code times the scale of its block."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dequantised", "scales_of_rows"]


def scales_of_rows(scales: Tensor, length: int, block_size: int) -> Tensor:
    """Return the scale of each of `length` rows, (B, K, S), of scales (B, K, blocks).

    >>> scales_of_rows(torch.tensor([[[1.0, 2.0]]]), 5, 3)
    tensor([[[1., 1., 1., 2., 2.]]])
    """
    # not repeated: a block may be larger than memory, whatever the rows are
    return scales[..., torch.arange(length, device=scales.device) // block_size]


def dequantised(
    codes: Tensor, scales: Tensor, block_size: int, layout: str, dtype: torch.dtype
) -> Tensor:
    """Return the keys or values that codes in the layout stand for, multiplied in `dtype`."""
    row = 1 if layout == "BTNH" else 2
    each = scales_of_rows(scales, codes.shape[row], block_size)
    each = each.transpose(1, 2) if layout == "BTNH" else each
    return codes.to(dtype) * each.to(dtype).unsqueeze(-1)
