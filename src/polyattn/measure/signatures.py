"""From a mask's signature back to a mask, with arrays made up where the real ones were not kept.

A signature says what times depend on: kinds, sizes, alignment. Lengths are drawn between half
and all of what fits, segments and packed sequences are of equal length, block maps keep half of
their blocks.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import TuningError
from polyattn.masks import (
    BlockMap,
    Causal,
    Dense,
    Full,
    Mask,
    Packed,
    Padding,
    PrefixLM,
    Segments,
    Window,
)
from polyattn.masks.biases import Alibi, Bias, DenseBias
from polyattn.masks.structure import Structure, structure_of
from polyattn.problem import Problem

__all__ = ["bias_like", "mask_like"]


def mask_like(problem: Problem, real: Tensor | None, generator: torch.Generator) -> Mask | None:
    """Return a mask of the problem's signature; `real` is the boolean array of its Dense."""
    if problem.mask is None:
        return None
    try:
        return _Maker(problem, real, generator).made(problem.mask.structure)
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
    shape = _shape(*sizes)
    array = _fitting(real, shape)
    if array is None or array.dtype == torch.bool:
        array = torch.randn(shape, generator=generator).to(getattr(torch, dtype_name))
    return Alibi(array.abs() / 4) if kind == "Alibi" else DenseBias(array)


def _shape(sizes: int | tuple[int, ...] = ()) -> tuple[int, ...]:
    return (sizes,) if isinstance(sizes, int) else sizes


def _fitting(real: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Return the recorded array in the shape of the signature, if it is that array."""
    if real is None or tuple(x for x in real.shape if x != 1) != tuple(x for x in shape if x != 1):
        return None
    while real.dim() > len(shape):
        real = real.squeeze(0) if real.shape[0] == 1 else real.reshape(shape)
    return real if tuple(real.shape) == shape else real.reshape(shape)


class _Maker:
    """Walks the mask's structure."""

    def __init__(self, problem: Problem, real: Tensor | None, generator: torch.Generator) -> None:
        self.problem, self.real, self.generator = problem, real, generator

    def made(self, mask: Structure) -> Mask:
        if mask.parts:
            join = operator.and_ if mask.kind == "And" else operator.or_
            return functools.reduce(join, map(self.made, mask.parts))
        return _LEAVES[mask.kind](self, *mask.arguments, **mask.named)  # type: ignore[no-any-return]

    def lengths(self, count: Any, most: int) -> Tensor | None:
        if count is None:
            return None
        low = max(1, most // 2) if most else 0
        drawn = torch.randint(low, most + 1, (int(count),), generator=self.generator)
        return drawn.to(torch.int32)

    def padding(self, q: Any, kv: Any) -> Mask:
        return Padding(self.lengths(q, self.problem.q_len), self.lengths(kv, self.problem.kv_len))

    def segments(self, q: Any, kv: Any) -> Mask:
        parts = 4

        def ids(sizes: Any) -> Tensor:
            shape = _shape(sizes)
            return (
                (torch.arange(shape[-1]) * parts // max(shape[-1], 1)).to(torch.int32).expand(shape)
            )

        return Segments(ids(q), ids(kv))

    def packed(self, q: Any, kv: Any) -> Mask:
        def offsets(total: int) -> Tensor:
            return torch.linspace(0, total, int(q)).round().to(torch.int32)

        return Packed(offsets(self.problem.q_len), offsets(self.problem.kv_len))

    def blocks(self, block_q: int, block_k: int, sizes: Any) -> Mask:
        batch, heads, rows, _ = shape = _shape(sizes)
        columns = -(-self.problem.kv_len // block_k)
        kept = min(shape[-1], max(1, columns // 2))
        order = torch.rand((batch, heads, rows, columns), generator=self.generator).argsort(-1)
        indices = torch.zeros(shape, dtype=torch.int32)
        indices[..., :kept] = order[..., :kept].to(torch.int32)
        counts = torch.full((batch, heads, rows), kept, dtype=torch.int32)
        return BlockMap(block_q, block_k, indices, counts)

    def dense(self, sizes: Any = ()) -> Mask:
        shape = _shape(sizes)
        real = _fitting(self.real, shape)
        if real is not None and real.dtype == torch.bool:
            return Dense(real)
        drawn = torch.rand(shape, generator=self.generator) < 0.7
        if shape:
            drawn[..., :1] = True
        return Dense(drawn)


_LEAVES: dict[str, Any] = {
    "Full": lambda maker: Full(),
    "Causal": lambda maker, align="bottom_right": Causal(align),
    "Window": lambda maker, left, right: Window(left, right),
    "PrefixLM": lambda maker, count: PrefixLM(maker.lengths(count, maker.problem.kv_len)),
    "Padding": _Maker.padding,
    "Segments": _Maker.segments,
    "Packed": _Maker.packed,
    "BlockMap": _Maker.blocks,
    "Dense": _Maker.dense,
}
