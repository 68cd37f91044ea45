"""What products of bytes may round beyond the tolerance of every call.

With codes of int8 and queries in a half type a kernel may round a query to 16 bits of its largest
element, and the probabilities that meet 64 neighbouring keys, times the scales of the values, to
16 bits of the largest among them. A sum of few large terms is right as every other; but where the
key that is attended to most has a code near 0, what the others add is all there is, and that is
known to a step of 2**-16 of the largest. It is at most an eighth of a step of the codes themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.conformance.cases import Case

__all__ = ["byte_rounding", "multiplies_bytes"]

_HALF_STEP = 0.5 / (127 * 256)
_TOGETHER = 64


def multiplies_bytes(case: Case) -> bool:
    """Say whether a case is one of codes of int8 and half types."""
    half = case.dtype in ("float16", "bfloat16")
    return half and case.quantized is not None and case.quantized[0] == "int8"


def byte_rounding(
    scale: float, q: Tensor, k: Tensor, v: Tensor, value_scales: Tensor, p: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how far out (B, N, T, V) and lse (B, N, T) may be beyond the tolerance.

    q (B, N, T, H), k (B, N, S, H), v (B, N, S, V) in float64, shared heads repeated;
    `value_scales` (B, N, S); `p` (B, N, T, S) the probabilities, `seen` where a key is visible.
    """
    sizes = torch.where(seen, k.abs().sum(-1).unsqueeze(-2), 0)
    most = sizes.amax(-1) if sizes.shape[-1] else sizes.sum(-1)
    queries = q.abs().amax(-1) if q.shape[-1] else q.sum(-1)
    of_scores = abs(scale) * queries * most * _HALF_STEP
    out = 2 * of_scores.unsqueeze(-1) * (p @ v.abs())
    weights = p * value_scales.abs().unsqueeze(-2)
    codes = torch.where(value_scales.unsqueeze(-1) == 0, 0, v / value_scales.unsqueeze(-1)).abs()
    for first in range(0, p.shape[-1], _TOGETHER):
        here = slice(first, first + _TOGETHER)
        largest = weights[..., here].amax(-1, keepdim=True)
        out = out + largest * codes[..., here, :].sum(-2, keepdim=True) * _HALF_STEP
    return out, of_scores
