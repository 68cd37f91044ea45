"""Tensors moved by a rounding, to see what a module's own arithmetic makes of that."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

__all__ = ["ROUNDINGS", "moved"]

ROUNDINGS = 4.0
"""How many roundings tensors are moved by. What the function makes of them is as many times larger;
what the port's arithmetic loses by itself is not, so that no port is excused by its own loss."""


def moved(t: Tensor, name: str) -> Tensor:
    """Return a tensor of the CPU with every element off by at most about `ROUNDINGS` spacings.

    Each element by a factor of its own, as it is rounded, and each row by one of its own, as what
    is summed over it is: many roundings of elements average out in a sum, that of the sum does not.
    `name`: another one gives other factors, the same one the same. Zeros, infinities and integers
    stay; torch's own random numbers are left alone.

    >>> t = torch.ones(2, 4, dtype=torch.bfloat16)
    >>> bool((moved(t, "x") - t).abs().max() <= 1.2 * ROUNDINGS * torch.finfo(t.dtype).eps)
    True
    """
    if not t.is_floating_point() and not t.is_complex():
        return t
    eps = torch.finfo(t.dtype).eps
    source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    rows = (*t.shape[:-1], 1) if t.dim() else ()
    factor = torch.ones((), dtype=torch.float64)
    for shape in (t.shape, rows):
        by = torch.rand(shape, generator=source, dtype=torch.float64) - 0.5
        factor = factor * (1 + ROUNDINGS * eps * by)
    wide = t.to(torch.complex128 if t.is_complex() else torch.float64) * factor
    if t.is_complex():
        return wide.to(t.dtype)
    largest = torch.finfo(t.dtype).max
    return torch.where(t.isfinite(), wide.clamp(-largest, largest), wide).to(t.dtype)
