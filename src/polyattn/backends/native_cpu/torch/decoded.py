"""A mask's program read back as a dense mask, in plain operations of torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyattn.native.decoded import allowed_at, sequences_of
from polyattn.torch.kit.masking import Dims, grid

__all__ = ["allowed_by"]


def allowed_by(
    codes: Sequence[int], arrays: Sequence[Tensor], dims: Dims, device: torch.device
) -> Tensor:
    """Return which keys a query may attend, (B|1, N|1, T|1, S|1) bool.

    `codes`, `arrays`: see `polyattn.native.program`. Packed rows are one batch entry.
    """
    index = grid(sequences_of(codes, arrays), dims, device)
    found: Tensor | None = allowed_at(codes, arrays, index)
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device) if found is None else found
