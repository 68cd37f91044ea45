"""Nested tensors: which dim of a jagged one is ragged, and what it remembers of its lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.torch.internals.private_names import MISSING, noted

__all__ = ["known_lengths", "ragged_dim"]


def _sample() -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(1, 1)], layout=torch.jagged)


_RAGGED = noted(
    "torch.nested.NestedTensor._ragged_idx",
    "jagged nested tensors are refused: pass their values with layout='packed'",
    sample=_sample,
)
_SHORTEST = noted(
    "torch.nested.NestedTensor._maybe_min_seqlen",
    "the output of a jagged call counts its lengths anew where it is asked for them",
    sample=_sample,
)
_LONGEST = noted(
    "torch.nested.NestedTensor._maybe_max_seqlen", "as without _maybe_min_seqlen", sample=_sample
)


def ragged_dim(x: Any) -> int:
    """Return which dim of a jagged nested tensor varies from entry to entry."""
    found = getattr(x, "_ragged_idx", MISSING)
    if found is MISSING:
        _RAGGED.refuse()
    return found  # type: ignore[no-any-return]


def known_lengths(x: Any) -> tuple[int | None, int | None]:
    """Return the least and the greatest length, as far as the tensor remembers them."""
    return getattr(x, "_maybe_min_seqlen", None), getattr(x, "_maybe_max_seqlen", None)
