"""Models of transformers, built small, each with inputs that it takes."""

from __future__ import annotations

import contextlib
import copy
import importlib
import operator
from typing import Any

import torch
from torch import Tensor, nn

from polyattn.bench.models.transformers_models.model_classes import class_of, config_class_of
from polyattn.bench.models.transformers_models.model_inputs import candidates, padded
from polyattn.bench.models.transformers_models.recipe import Recipe
from polyattn.bench.models.transformers_models.recipes import RECIPES
from polyattn.bench.models.transformers_models.shrinking import ways

__all__ = ["Built", "built", "kind_of", "spread"]

_MOST_WEIGHTS = 150_000_000


class Built:
    """A small model on the library's attention, and inputs that it takes, by kind."""

    def __init__(
        self, model: Any, cases: dict[str, tuple[dict[str, Any], Tensor | None]],
        beside: str = "eager",
    ) -> None:  # fmt: skip
        self.model, self.cases, self.beside = model, cases, beside
        self._small = {n: p.clone() for n, p in model.named_parameters() if p.dim() < 2}

    def draw(self, seed: int) -> None:
        """Give the model other weights: for one seed always the same."""
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if name in self._small:
                    weight.copy_(self._small[name])
        spread(self.model, seed)


def built(name: str, layers: int = 2, weights: int = _MOST_WEIGHTS) -> Built:
    """Build a model small, the first way in which it runs; raises what kept the first from it.

    It has `layers` layers at least and no more `weights`.
    """
    failure: Exception | None = None
    recipe = RECIPES.get(name, Recipe())
    for way in ways(layers):
        try:
            config = (recipe.start or config_class_of(name))()
            way(config)
            if recipe.change is not None:
                recipe.change(config)
            return _running(_made(kind_of(name), config, weights, recipe.beside), recipe)
        except Exception as error:  # the next way may do
            failure = failure or error
    assert failure is not None
    raise failure


def kind_of(name: str) -> Any:
    """Return the class that is built: the bare model, or the one that its recipe names."""
    named = RECIPES.get(name, Recipe()).kind
    return getattr(importlib.import_module("transformers"), named) if named else class_of(name)


_from_config = operator.attrgetter("_from_config")


def _made(kind: Any, config: Any, most: int, beside: str = "eager") -> Any:
    with torch.device("meta"):
        twin = _from_config(kind)(copy.deepcopy(config), attn_implementation=beside)
    weights = sum(p.numel() for p in twin.parameters())
    if weights > most:
        raise ValueError(f"{weights:,} weights, though its configuration was made small")
    torch.manual_seed(0)
    model = _from_config(kind)(config, attn_implementation=beside).eval().requires_grad_(False)
    if hasattr(model, "set_experts_implementation"):
        with contextlib.suppress(Exception):  # grouped products, which have no float64
            model.set_experts_implementation("eager")
    return model


def _running(model: Any, recipe: Recipe) -> Built:
    tried = candidates(model) if recipe.inputs is None else recipe.inputs(model)
    failure: Exception | None = None
    for inputs in tried:
        try:
            with torch.no_grad():
                model(**inputs)
        except Exception as error:  # the next inputs may suit it
            failure = failure or error
            continue
        spread(model)
        return Built(model, _cases(model, inputs), recipe.beside)
    raise failure or ValueError("nothing is known that it takes")


def _cases(model: Any, inputs: dict[str, Any]) -> dict[str, tuple[dict[str, Any], Tensor | None]]:
    """Return the inputs unpadded and, where the model takes a padding mask, padded on each side."""
    found: dict[str, tuple[dict[str, Any], Tensor | None]] = {"unpadded": (inputs, None)}
    for side in ("left", "right"):
        made = padded(inputs, model, side == "left")
        if made is None:
            continue
        with contextlib.suppress(Exception), torch.no_grad():  # not each takes each side
            model(**made[0])
            found[f"padded {side}"] = made
    return found


def spread(model: nn.Module, seed: int = 1) -> None:
    """Give a model weights with which its scores differ, so that masks and soft caps matter."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point():
                continue
            noise = torch.randn(weight.shape, generator=chance)
            if weight.dim() < 2:
                weight.add_(noise, alpha=0.1)
                continue
            terms = 4 if "emb" in name and weight.dim() == 2 else weight[0].numel()
            weight.copy_(noise * min(1.0, max(terms, 1) ** -0.5))
