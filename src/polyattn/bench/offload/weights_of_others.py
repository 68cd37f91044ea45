"""Weights as other libraries make them: adapters beside frozen layers, and quantised parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polyattn.torch.internals import wrapper_tensor

__all__ = ["Int8Weight", "Lora", "quantised", "with_adapters"]


class Lora(nn.Module):
    """A frozen layer and a low-rank adapter beside it (arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.up(self.down(x))


def with_adapters(model: nn.Module) -> int:
    """Put an adapter beside every fourth linear layer of blocks; return how many."""
    torch.manual_seed(3)
    layers = [
        (name, part)
        for name, part in model.named_modules()
        if type(part) is nn.Linear and part.weight.dtype == torch.float32 and "." in name
    ][::4]
    for name, part in layers:
        where, _, last = name.rpartition(".")
        setattr(model.get_submodule(where), last, Lora(part))
    return len(layers)


class Int8Weight(Tensor):
    """Codes and a scale for each row, as weight-only quantisation keeps them: a tensor subclass."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Int8Weight:
        made: Int8Weight = wrapper_tensor(cls, codes.shape, dtype=scales.dtype, device=codes.device)
        return made

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """Quantise a weight."""
        scales = weight.abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
        return cls((weight / scales).round().to(torch.int8), scales)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Int8Weight:
        return Int8Weight(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        one = args[0] if args else None
        whole: Callable[[Callable[[Tensor], Tensor]], Int8Weight]
        if isinstance(one, Int8Weight):
            whole = lambda each: cls(each(one.codes), each(one.scales))  # noqa: E731
            if function in (aten.detach.default, aten.alias.default):
                return whole(lambda x: x)
            if function is aten.clone.default:
                return whole(torch.clone)
        return function(*map(_whole, args), **(kwargs or {}))


def _whole(given: Any) -> Any:
    """Return what an operator computes with for what it was given."""
    if isinstance(given, Int8Weight):
        return given.codes * given.scales
    if isinstance(given, list | tuple):
        return type(given)(map(_whole, given))
    return given


def quantised(model: nn.Module) -> int:
    """Make the weights of linear layers quantised parameters; return of how many."""
    layers = [part for part in model.modules() if type(part) is nn.Linear]
    for part in layers:
        weight = Int8Weight.of(part.weight.detach())
        part.weight = nn.Parameter(weight, requires_grad=False)
    return len(layers)
