"""Where NaN and infinities go: to the rows that attend to them, and to no other."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["spread_values"]


def spread_values(out: Tensor, v: Tensor, allowed: Tensor, groups: int) -> Tensor:
    """Let the non-finite values of `v` reach the rows of `out` that attend to them.

    `out` (B, N, T, V) was computed with zeros for them; `v` (B, K, S, V), `allowed` (B, N, T, S),
    `groups` N // K.
    """
    kinds = torch.cat([v.isnan(), v == float("inf"), v == float("-inf")], -1)
    seen = allowed.unflatten(1, (-1, groups)).to(out.dtype) @ kinds.unsqueeze(2).to(out.dtype)
    nan, high, low = (seen.flatten(1, 2) > 0).chunk(3, -1)
    out = torch.where(high, float("inf"), out)
    out = torch.where(low, float("-inf"), out)
    return torch.where(nan | (high & low), float("nan"), out)
