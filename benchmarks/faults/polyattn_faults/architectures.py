"""The architectures that faults are seeded into, with seeded weights that keep activations O(1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyattn.errors import PolyattnError
from polyattn_faults import generation, language, perception

__all__ = ["ARCHITECTURES", "Architecture", "chosen"]

Made = tuple[nn.Module, dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """`make` gives an untrained model and its inputs; :meth:`build` one with seeded weights."""

    name: str
    make: Callable[[int], Made]

    def build(self, seed: int, dtype: torch.dtype) -> Made:
        """Return the model in evaluation mode, and keyword arguments for one forward."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, inputs = self.make(seed)
            seed_weights(model)
        model.eval().to(dtype)
        return model, {name: _cast(value, dtype) for name, value in inputs.items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


_OWN = ("A_log", "dt_proj.bias", "logit_scale", "weight_g", "parametrizations")
"""What is no plain matrix, norm or bias stays as the library makes it, but for a little noise."""


@torch.no_grad()
def seed_weights(model: nn.Module) -> None:
    """Give every parameter random values: matrices keep sizes, norms are near 1, biases are small.

    A library's own start has zeros and ones, under which many faults change nothing.
    """
    of = {
        f"{name}.{param}": module
        for name, module in model.named_modules()
        for param, _ in module.named_parameters(recurse=False)
    }
    for name, p in model.named_parameters():
        noise = torch.randn_like(p)
        module = of.get(name, model)
        if any(one in name for one in _OWN):
            p.mul_(1 + 0.05 * noise)
        elif isinstance(module, nn.Embedding):
            p.copy_(noise)
        elif p.dim() >= 2:
            p.copy_(noise / math.sqrt(_fan_in(p, module)))
        elif name.endswith("bias"):
            p.copy_(0.2 * noise)
        else:
            p.copy_(1 + 0.2 * noise)


def _fan_in(p: Tensor, module: nn.Module) -> float:
    kind = type(module).__name__
    if kind == "Conv1D":
        return p.shape[0]
    if p.dim() == 3 and kind.endswith("Experts"):
        return p.shape[-1]
    inputs = p[0].numel() if p.shape[0] > 1 else p.shape[-1]
    return float(max(1, inputs))


ARCHITECTURES: Mapping[str, Architecture] = {
    make.__name__: Architecture(make.__name__, make)
    for make in (
        language.llama,
        language.gpt2,
        language.bert,
        language.t5,
        language.mixtral,
        language.mamba,
        perception.vit,
        perception.clip,
        perception.whisper,
        perception.wav2vec2,
        generation.unet,
        generation.autoencoder,
        generation.dit,
        generation.sd3,
        generation.flux,
        generation.wan,
    )
}

_QUICK = ("llama", "t5", "vit", "unet")


def chosen(names: tuple[str, ...], quick: bool) -> list[Architecture]:
    """Return the architectures of these names; all, or for a quick run a few, where none is."""
    unknown = [name for name in names if name not in ARCHITECTURES]
    if unknown:
        raise PolyattnError(
            f"got --models {','.join(names)}, expected names of: {', '.join(ARCHITECTURES)}."
        )
    return [ARCHITECTURES[name] for name in names or (_QUICK if quick else ARCHITECTURES)]
