"""Whether a tensor is a DTensor, asked without importing what knows them."""

from __future__ import annotations

from typing import Any

__all__ = ["is_sharded"]


def is_sharded(*tensors: Any) -> bool:
    """Say whether one of them is a DTensor; see `polyattn.torch.sharded`."""
    for x in tensors:
        if type(x).__name__ == "DTensor" and type(x).__module__.startswith("torch.distributed"):
            return True
    return False
