"""From a case to the arguments of a call: tensors with their strides, masks with their arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from polyattn.conformance.cases import Case, Tree
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

__all__ = ["Inputs", "build", "place"]

NAN = float("nan")


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call and the gradients that come in from behind it."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    bias: Bias | None
    sinks: Tensor | None
    grad_out: Tensor
    grad_lse: Tensor

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of :func:`polyattn.torch.attention`."""
        case = self.case
        return {
            "mask": self.mask, "bias": self.bias, "sinks": self.sinks, "scale": case.scale,
            "softcap": case.softcap, "layout": case.layout, "return_lse": case.lse,
            "deterministic": True if case.deterministic else None,
        }  # fmt: skip

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that want gradients, by name."""
        bias = None if self.bias is None else self.bias.payload
        every = {"query": self.q, "key": self.k, "value": self.v, "bias": bias, "sinks": self.sinks}
        return {name: x for name, x in every.items() if x is not None and x.requires_grad}

    def poisoned(self, q_bad: Tensor, k_bad: Tensor, v_bad: Tensor, poison: float) -> Inputs:
        """Return the same call with `poison` where the bools are True; stride-0 tensors are kept.

        An infinite poison stands for the largest number of the dtype, which scores overflow with.
        """
        largest = torch.finfo(self.q.dtype).max
        poison = max(-largest, min(largest, poison)) if poison == poison else poison
        changed: dict[str, Any] = {}
        for name, bad, letter in zip("qkv", (q_bad, k_bad, v_bad), self.case.strides, strict=True):
            x = getattr(self, name)
            if letter != "e":
                values = torch.where(bad.to(x.device), poison, x.detach())
                changed[name] = place(values, letter).requires_grad_(x.requires_grad)
        return replace(self, **changed)


def place(values: Tensor, letter: str) -> Tensor:
    """Return `values` with the strides that the letter of :class:`Case` names; NaN in the gaps."""
    shape = values.shape
    if letter == "t":
        return values.transpose(-2, -3).contiguous().transpose(-2, -3)
    if letter == "e":
        dim = 0 if len(shape) == 4 and shape[0] > 1 else len(shape) - 2
        return values.narrow(dim, 0, min(1, shape[dim])).expand(shape)
    if letter == "s":
        base = values.new_full((*shape[:-1], 2 * shape[-1]), NAN)
        base[..., ::2] = values
        return base[..., ::2]
    if letter == "o":
        base = values.new_full((*(size + 2 for size in shape[:-1]), shape[-1] + 3), NAN)
        cut = base[(*(slice(1, size + 1) for size in shape[:-1]), slice(1, shape[-1] + 1))]
        cut.copy_(values)
        return cut
    return values.contiguous()


def build(case: Case, device: str = "cpu") -> Inputs:
    """Make the arguments of a case; the same every time, and on every device."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int, as_dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(as_dtype).to(device)

    def arranged(heads: int, length: int, dim: int) -> tuple[int, ...]:
        if case.packed:
            return length, heads, dim
        middle = (length, heads) if case.layout == "BTNH" else (heads, length)
        return (case.b, *middle, dim)

    shapes = {
        "q": arranged(case.n, case.t, case.h),
        "k": arranged(case.k, case.s, case.h),
        "v": arranged(case.k, case.s, case.v),
    }
    tensors = {
        name: place(normal(*shape), letter).requires_grad_(name in case.grad)
        for (name, shape), letter in zip(shapes.items(), case.strides, strict=True)
    }
    sinks = None
    if case.sinks:
        own = dtype if case.seed % 2 else torch.float32
        sinks = normal(case.n, *((case.sinks,) if case.sinks > 1 else ()), as_dtype=own)
        sinks = sinks.requires_grad_("s" in case.grad)
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    lse_shape = (case.n, case.t) if case.packed else (case.b, case.n, case.t)
    return Inputs(
        case,
        **tensors,
        mask=_mask(case),
        bias=_bias(case, normal, generator),
        sinks=sinks,
        grad_out=normal(*arranged(case.n, case.t, case.v)),
        grad_lse=normal(*lse_shape, as_dtype=wide),
    )


def _bias(case: Case, normal: Any, generator: torch.Generator) -> Bias | None:
    if case.bias is None:
        return None
    kind, *_ = case.bias
    dtype = getattr(torch, case.dtype)
    if kind == "alibi":
        _, batched, own = case.bias
        shape: tuple[int, ...] = (case.b, case.n) if batched else (case.n,)
        slopes = normal(*shape, as_dtype=dtype if own == "own" else torch.float32).abs() / 4
        return Alibi(slopes.requires_grad_("b" in case.grad))
    _, dims, own, with_inf = case.bias
    array = normal(*_broadcast(case, dims), as_dtype=dtype if own == "own" else torch.float32)
    if with_inf:
        holes = torch.rand(array.shape, generator=generator) < 0.25
        array = torch.where(holes.to(array.device), float("-inf"), array)
    return DenseBias(array.requires_grad_("b" in case.grad))


def _broadcast(case: Case, dims: str) -> tuple[int, ...]:
    full = dict(zip("bnts", (case.b, case.n, case.t, case.s), strict=True))
    shape = tuple(size if dim in dims else 1 for dim, size in full.items())
    while shape and shape[0] == 1 and case.seed % 3 == 0:  # dims that are missing broadcast as well
        shape = shape[1:]
    return shape


def _mask(case: Case) -> Mask | None:
    rng = Random(case.seed)
    if not case.packed:
        return None if case.mask is None else _tree(case, case.mask, rng)
    packed = Packed(*(_array(rng, _offsets(rng, case.b, size)) for size in (case.t, case.s)))
    return packed if case.mask is None else packed & _tree(case, case.mask, rng)


def _offsets(rng: Random, sequences: int, total: int) -> list[int]:
    """Offsets with some sequences empty."""
    if sequences == 0:
        return [0]
    return [0, *sorted(rng.randint(0, total) for _ in range(sequences - 1)), total]


def _tree(case: Case, tree: Tree, rng: Random) -> Mask:
    kind, *args = tree
    if kind in ("and", "or"):
        mask = _tree(case, args[0], rng)
        for part in args[1:]:
            other = _tree(case, part, rng)
            mask = mask & other if kind == "and" else mask | other
        return mask
    return _LEAVES[kind](case, rng, *args)


def _array(rng: Random, values: Any, dtype: torch.dtype = torch.int32) -> Any:
    """Return nested lists as they are, or as a tensor."""
    return values if rng.random() < 0.2 else torch.tensor(values, dtype=dtype)


def _padding(case: Case, rng: Random, queries: bool, keys: bool) -> Mask:
    lengths = [
        _array(rng, [rng.choice((0, size, rng.randint(0, size))) for _ in range(case.b)])
        if on
        else None
        for on, size in ((queries, case.t), (keys, case.s))
    ]
    return Padding(*lengths)


def _segments(case: Case, rng: Random, batched: bool, own_keys: bool) -> Mask:
    def ids(size: int) -> Any:
        drawn = [rng.randint(0, 3) for _ in range(size)]
        return sorted(drawn) if rng.random() < 0.7 else drawn

    def some(size: int) -> Any:
        rows = [ids(size) for _ in range(case.b)] if batched else ids(size)
        return torch.tensor(rows, dtype=torch.int32).reshape((case.b, size) if batched else (size,))

    q_ids = some(case.t)
    return Segments(q_ids, some(case.s) if own_keys or case.s != case.t else None)


def _prefix(case: Case, rng: Random) -> Mask:
    return PrefixLM(_array(rng, [rng.randint(0, case.s) for _ in range(case.b)]))


def _blocks(case: Case, rng: Random, block_q: int, block_k: int, batch: bool, head: bool) -> Mask:
    b, n = (case.b if batch else 1), (case.n if head else 1)
    rows, columns = -(-case.t // block_q), -(-case.s // block_k)
    indices = torch.zeros((b, n, rows, columns), dtype=torch.int32)
    counts = torch.zeros((b, n, rows), dtype=torch.int32)
    for x in range(b):
        for y in range(n):
            for row in range(rows):
                counts[x, y, row] = rng.randint(0, columns)
                indices[x, y, row] = torch.tensor(rng.sample(range(columns), columns))
    return BlockMap(block_q, block_k, indices, counts)


def _dense(case: Case, rng: Random, dims: str) -> Mask:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
    return Dense(torch.rand(_broadcast(case, dims), generator=generator) < rng.choice((0.3, 0.7)))


_LEAVES: dict[str, Any] = {
    "full": lambda case, rng: Full(),
    "causal": lambda case, rng, align: Causal(align),
    "window": lambda case, rng, left, right: Window(left, right),
    "padding": _padding,
    "segments": _segments,
    "prefix": _prefix,
    "blocks": _blocks,
    "dense": _dense,
}
