"""From a case to the arguments of a call: tensors with their strides, masks with their arrays."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from polyattn.conformance.cases import Case, Tree
from polyattn.errors import InvalidProblem, near_matches
from polyattn.masks import LEAVES, Mask, Packed
from polyattn.masks.biases import Alibi, Bias, DenseBias
from polyattn.masks.needs import Shape, Sizes, dims_of
from polyattn.torch import quantize_kv

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
    quantised: tuple[Tensor, Tensor, int] | None = None  # scales of keys, of values, block size

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of :func:`polyattn.torch.attention`.

        Or of :func:`polyattn.torch.quantized_attention`, where k and v are codes.
        """
        case = self.case
        options = {
            "mask": self.mask, "bias": self.bias, "sinks": self.sinks, "scale": case.scale,
            "softcap": case.softcap, "layout": case.layout, "return_lse": case.lse,
        }  # fmt: skip
        if self.quantised is not None:
            return options
        return options | {"deterministic": True if case.deterministic else None}

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that want gradients, by name."""
        bias = None if self.bias is None else self.bias.payload
        every = {"query": self.q, "key": self.k, "value": self.v, "bias": bias, "sinks": self.sinks}
        return {name: x for name, x in every.items() if x is not None and x.requires_grad}

    def poisoned(self, q_bad: Tensor, k_bad: Tensor, v_bad: Tensor, poison: float) -> Inputs:
        """Return the same call with `poison` where the bools are True; stride-0 tensors are kept.

        An infinite poison stands for the largest number of the dtype, which scores overflow with.
        The scale of a block of codes is poisoned where all of its keys are.
        """
        changed: dict[str, Any] = {}
        if self.quantised is not None:
            keys, values, block_size = self.quantised
            of_k, of_v = self.case.strides[1], self.case.strides[2]
            changed["quantised"] = (
                keys if of_k == "e" else _struck_blocks(self, keys, k_bad, poison),
                values if of_v == "e" else _struck_blocks(self, values, v_bad, poison),
                block_size,
            )
        largest = torch.finfo(self.q.dtype).max
        poison = max(-largest, min(largest, poison)) if poison == poison else poison
        for name, bad, letter in zip("qkv", (q_bad, k_bad, v_bad), self.case.strides, strict=True):
            x = getattr(self, name)
            if letter != "e":
                values = _struck(x.detach(), bad.to(x.device), poison)
                changed[name] = place(values, letter).requires_grad_(x.requires_grad)
        return replace(self, **changed)


def _struck_blocks(inputs: Inputs, scales: Tensor, bad: Tensor, poison: float) -> Tensor:
    """Return scales with `poison` for the blocks of which all rows are bad."""
    rows = bad[..., 0] if inputs.case.layout == "BNTH" else bad[..., 0].transpose(1, 2)
    assert inputs.case.quantized is not None
    _, block_size = inputs.case.quantized
    blocks = [part.all(-1) for part in rows.split(block_size, -1)] if rows.shape[-1] else []
    whole = torch.stack(blocks, -1) if blocks else scales.new_zeros(scales.shape, dtype=torch.bool)
    return torch.where(whole.to(scales.device), poison, scales)


def _struck(x: Tensor, bad: Tensor, poison: float) -> Tensor:
    """Return `x` with `poison` where `bad` is True; of codes, the worst that there is of it."""
    if x.dtype == torch.int8:
        return torch.where(bad, -128, x)
    if x.dtype == torch.float8_e4m3fn:
        worst = poison if poison != poison else torch.finfo(x.dtype).max
        return torch.where(bad, worst, x.float()).to(x.dtype)
    return torch.where(bad, poison, x)


def place(values: Tensor, letter: str) -> Tensor:
    """Return `values` with the strides that the letter of :class:`Case` names; NaN in the gaps.

    Of int8 that is the code that no rounding gives.
    """
    shape = values.shape
    gap = NAN if values.is_floating_point() else -128
    if letter == "t":
        return values.transpose(-2, -3).contiguous().transpose(-2, -3)
    if letter == "e":
        dim = 0 if len(shape) == 4 and shape[0] > 1 else len(shape) - 2
        return values.narrow(dim, 0, min(1, shape[dim])).expand(shape)
    if letter == "s":
        base = values.new_full((*shape[:-1], 2 * shape[-1]), gap)
        base[..., ::2] = values
        return base[..., ::2]
    if letter == "o":
        base = values.new_full((*(size + 2 for size in shape[:-1]), shape[-1] + 3), gap)
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
    drawn = {name: normal(*shape) for name, shape in shapes.items()}
    quantised = _quantise(case, drawn)
    tensors = {
        name: place(drawn[name], letter).requires_grad_(name in case.grad)
        for name, letter in zip("qkv", case.strides, strict=True)
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
        quantised=quantised,
    )


def _quantise(case: Case, drawn: dict[str, Tensor]) -> tuple[Tensor, Tensor, int] | None:
    """Replace keys and values by their codes; return scales and block size."""
    if case.quantized is None:
        return None
    dtype, block_size = case.quantized
    scales = []
    for name in "kv":
        drawn[name], found = quantize_kv(
            drawn[name], dtype=dtype, block_size=block_size, layout=case.layout
        )
        scales.append(found)
    return scales[0], scales[1], block_size


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
    full = zip("bnts", (case.b, case.n, case.t, case.s), strict=True)
    shape = _broadcast(case, tuple(size if dim in dims else 1 for dim, size in full))
    array = normal(*shape, as_dtype=dtype if own == "own" else torch.float32)
    if with_inf:
        holes = torch.rand(array.shape, generator=generator) < 0.25
        array = torch.where(holes.to(array.device), float("-inf"), array)
    return DenseBias(array.requires_grad_("b" in case.grad))


def _broadcast(case: Case, shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[0] == 1 and case.seed % 3 == 0:  # dims that are missing broadcast as well
        shape = shape[1:]
    return shape


def _mask(case: Case) -> Mask | None:
    arrays, sizes = _Random(case), Sizes(case.b, case.t, case.s, case.n)
    packed = Packed.example(sizes, arrays) if case.packed else None
    if case.mask is None:
        return packed
    mask = _tree(case.mask, sizes, arrays)
    return mask if packed is None else packed & mask


def _tree(tree: Tree, sizes: Sizes, arrays: _Random) -> Mask:
    name, *args = tree
    if name == "not":
        return ~_tree(args[0], sizes, arrays)
    if name in ("and", "or"):
        mask = _tree(args[0], sizes, arrays)
        for part in args[1:]:
            other = _tree(part, sizes, arrays)
            mask = mask & other if name == "and" else mask | other
        return mask
    kinds = {kind.__name__: kind for kind in LEAVES}
    if name not in kinds:
        raise InvalidProblem(
            f"got a case with the mask {name!r}, expected one of {', '.join(kinds)}, joined by "
            f'"and" and "or", or after "not".{near_matches(name, kinds)}'
        )
    return kinds[name].example(sizes, arrays, *args)


class _Random:
    """Arrays of masks with a bit of everything in them: empty, whole, in order or not."""

    def __init__(self, case: Case) -> None:
        self._case, self._rng = case, Random(case.seed)

    def lengths(self, shape: Shape, most: int) -> Any:
        (count,), rng = dims_of(shape), self._rng
        return self._listed([rng.choice((0, most, rng.randint(0, most))) for _ in range(count)])

    starts = lengths

    def ids(self, shape: Shape) -> Tensor:
        *rows, size = dims_of(shape)
        drawn = [self._row(size) for _ in range(rows[0])] if rows else self._row(size)
        return torch.tensor(drawn, dtype=torch.int32).reshape(shape)

    def _row(self, size: int) -> list[int]:
        drawn = [self._rng.randint(0, 3) for _ in range(size)]
        return sorted(drawn) if self._rng.random() < 0.7 else drawn

    def offsets(self, shape: Shape, total: int) -> Any:
        """Make some sequences empty."""
        (count,) = dims_of(shape)
        if count == 1:
            return self._listed([0])
        middle = sorted(self._rng.randint(0, total) for _ in range(count - 2))
        return self._listed([0, *middle, total])

    def _listed(self, values: list[int]) -> Any:
        """Return a list as it is, or as a tensor."""
        return values if self._rng.random() < 0.2 else torch.tensor(values, dtype=torch.int32)

    def blocks(self, shape: Shape, columns: int) -> tuple[Tensor, Tensor]:
        indices = torch.zeros(shape, dtype=torch.int32)
        counts = torch.zeros(indices.shape[:-1], dtype=torch.int32)
        for place in itertools.product(*map(range, counts.shape)):
            counts[place] = self._rng.randint(0, columns)
            indices[place] = torch.tensor(self._rng.sample(range(columns), columns))
        return indices, counts

    def booleans(self, shape: Shape) -> Tensor:
        generator = torch.Generator().manual_seed(self._rng.randrange(1 << 31))
        drawn = torch.rand(_broadcast(self._case, dims_of(shape)), generator=generator)
        return drawn < self._rng.choice((0.3, 0.7))
