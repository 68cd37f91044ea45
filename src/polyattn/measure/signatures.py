"""From a mask's signature back to a mask, with arrays made up where the real ones were not kept.

A signature says what times depend on: kinds, sizes, alignment. Lengths are drawn between half
and all of what fits, segments and packed sequences are of equal length, block maps keep half of
their blocks.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch import Tensor

from polyattn.errors import TuningError
from polyattn.masks import LEAVES, Mask
from polyattn.masks.biases import Alibi, Bias, DenseBias
from polyattn.masks.needs import Shape, Sizes, dims_of
from polyattn.masks.structure import Structure, structure_of
from polyattn.problem import Problem

__all__ = ["bias_like", "mask_like"]


def mask_like(problem: Problem, real: Tensor | None, generator: torch.Generator) -> Mask | None:
    """Return a mask of the problem's signature; `real` is the boolean array of its Dense."""
    if problem.mask is None:
        return None
    try:
        sizes = Sizes(problem.batch, problem.q_len, problem.kv_len, problem.heads)
        return _made(problem.mask.structure, sizes, _MadeUp(real, generator))
    except (KeyError, ValueError, TypeError) as error:
        raise TuningError(
            f"got the mask {problem.mask.signature!r}, expected a signature of polyattn ({error})."
        ) from error


def bias_like(problem: Problem, real: Tensor | None, generator: torch.Generator) -> Bias | None:
    """Return a bias of the problem's signature; `real` is the array that was recorded."""
    if problem.bias is None:
        return None
    try:
        kind, (*sizes, dtype_name), _, _ = structure_of(problem.bias)
        if kind not in ("DenseBias", "Alibi") or len(sizes) > 1:
            raise ValueError(kind)
    except ValueError as error:
        raise TuningError(
            f"got the bias {problem.bias!r}, expected a signature of polyattn."
        ) from error
    shape = dims_of(*sizes) if sizes else ()
    array = _fitting(real, shape)
    if array is None or array.dtype == torch.bool:
        array = torch.randn(shape, generator=generator).to(getattr(torch, dtype_name))
    return Alibi(array.abs() / 4) if kind == "Alibi" else DenseBias(array)


def _fitting(real: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Return the recorded array in the shape of the signature, if it is that array."""
    if real is None or tuple(x for x in real.shape if x != 1) != tuple(x for x in shape if x != 1):
        return None
    while real.dim() > len(shape):
        real = real.squeeze(0) if real.shape[0] == 1 else real.reshape(shape)
    return real if tuple(real.shape) == shape else real.reshape(shape)


def _made(mask: Structure, sizes: Sizes, arrays: _MadeUp) -> Mask:
    if mask.kind == "Not":
        return ~_made(mask.parts[0], sizes, arrays)
    if mask.parts:
        join = operator.and_ if mask.kind == "And" else operator.or_
        return functools.reduce(join, (_made(part, sizes, arrays) for part in mask.parts))
    return _KINDS[mask.kind].filled(sizes, arrays, *mask.arguments, **mask.named)


_KINDS = {kind.__name__: kind for kind in LEAVES}


class _MadeUp:
    """Arrays as times depend on them; `real` is the one that was recorded."""

    def __init__(self, real: Tensor | None, generator: torch.Generator) -> None:
        self._real, self._generator = real, generator

    def lengths(self, shape: Shape, most: int) -> Tensor:
        low = max(1, most // 2) if most else 0
        drawn = torch.randint(low, most + 1, dims_of(shape), generator=self._generator)
        return drawn.to(torch.int32)

    def starts(self, shape: Shape, most: int) -> Tensor:
        return most - self.lengths(shape, most)

    def ids(self, shape: Shape) -> Tensor:
        dims, parts = dims_of(shape), 4
        ids = torch.arange(dims[-1]) * parts // max(dims[-1], 1)
        return ids.to(torch.int32).expand(dims)

    def offsets(self, shape: Shape, total: int) -> Tensor:
        (count,) = dims_of(shape)
        return torch.linspace(0, total, count).round().to(torch.int32)

    def blocks(self, shape: Shape, columns: int) -> tuple[Tensor, Tensor]:
        *rows, most = dims_of(shape)
        kept = min(most, max(1, columns // 2))
        order = torch.rand((*rows, columns), generator=self._generator).argsort(-1)
        indices = torch.zeros(shape, dtype=torch.int32)
        indices[..., :kept] = order[..., :kept].to(torch.int32)
        return indices, torch.full(rows, kept, dtype=torch.int32)

    def booleans(self, shape: Shape) -> Tensor:
        dims = dims_of(shape)
        real = _fitting(self._real, dims)
        if real is not None and real.dtype == torch.bool:
            return real
        drawn = torch.rand(dims, generator=self._generator) < 0.7
        if dims:
            drawn[..., :1] = True
        return drawn
