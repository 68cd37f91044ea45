"""Transformers of diffusers, built small, each with inputs that it takes."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import nn

from polyattn.bench.models.diffusers_models.model_classes import class_of, recipe_of

__all__ = ["built", "called"]


def built(name: str, layers: int = 0) -> tuple[Any, dict[str, Any]]:
    """Build a class small, of as many layers as its recipe says, or of `layers` at least.

    Returns the model and its inputs; LookupError where there is no recipe.
    """
    recipe = recipe_of(name)
    inputs = {key: _made(told) for key, told in recipe["inputs"].items()}
    deeper = {
        key: max(count, layers)
        for key, count in recipe["config"].items()
        if type(count) is int and key in _LAYERS
    }
    torch.manual_seed(0)
    model = class_of(name)(**recipe["config"] | deeper).eval()
    _spread(model)
    return model, inputs


_LAYERS = frozenset({
    "num_layers", "num_single_layers", "num_hidden_layers", "num_mmdit_layers",
    "num_single_dit_layers", "mmdit_layers", "num_visual_blocks", "num_text_blocks", "depth",
    "dit_depth", "n_layers",
})  # fmt: skip


def called(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Return what a model gives, as plain values where it can."""
    plain = {"return_dict": False} if "return_dict" in signature(model.forward).parameters else {}
    return model(**inputs, **plain)


def _made(told: dict[str, Any]) -> Any:
    """Return what a recipe says of an input: numbers drawn, or those that it names."""
    if "plain" in told:
        return told["plain"]
    if "dict" in told:
        # JSON knows no keys that are numbers
        return {
            int(name) if name.isdigit() else name: _made(one) for name, one in told["dict"].items()
        }
    if "list" in told:
        made = [_made(one) for one in told["list"]]
        return tuple(made) if told.get("tuple") else made
    shape, dtype = told["shape"], getattr(torch, told["dtype"])
    chance = torch.Generator().manual_seed(len(shape) + sum(shape))
    if "value" in told:
        value = torch.as_tensor(told["value"]).to(dtype)
        return value.expand(shape).clone() if value.dim() == 0 else value.reshape(shape)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=chance).to(dtype)
    return torch.randint(told.get("below", 2), shape, generator=chance).to(dtype)


def _spread(model: nn.Module) -> None:
    """Give weights that begin as zeros some value, so that everything has a part in the output."""
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if not bool(weight.any()):
                weight.copy_(torch.randn(weight.shape, generator=chance) * 0.1)
