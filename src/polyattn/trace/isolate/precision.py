"""Running a model in a wider dtype for a while, with its own weights and buffers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from polyattn.errors import TraceError

__all__ = ["widened"]


@contextmanager
def widened(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Hold the model's narrower floating-point weights and buffers in `dtype`; then as before.

    The values are the same: widening is exact. It takes the memory of a copy. Raises TraceError
    for a dtype that is not float32 or float64.

    >>> model = nn.Linear(2, 2, dtype=torch.bfloat16)
    >>> with widened(model, torch.float32):
    ...     model.weight.dtype
    torch.float32
    >>> model.weight.dtype
    torch.bfloat16
    """
    if dtype is not None and dtype not in (torch.float32, torch.float64):
        raise TraceError(f"got upcast={dtype!r}, expected torch.float32 or torch.float64.")
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        if dtype is not None:
            for one in dict.fromkeys(itertools.chain(model.parameters(), model.buffers())):
                if one.is_floating_point() and one.dtype.itemsize < dtype.itemsize:
                    kept.append((one, one.data))
                    one.data = one.data.to(dtype)
        yield
    finally:
        for one, data in kept:
            one.data = data
