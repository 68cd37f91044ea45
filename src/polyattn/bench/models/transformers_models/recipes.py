"""What some models need beside what all of them get, to be built small and to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

__all__ = ["RECIPES", "Recipe"]


class Recipe(NamedTuple):
    """A change of the small configuration, and inputs that the model takes."""

    change: Callable[[Any], None] | None = None
    inputs: Callable[[Any], Iterator[dict[str, Any]]] | None = None


def _sets(**values: Any) -> Recipe:
    """Return a change that sets these fields."""

    def change(config: Any) -> None:
        for name, value in values.items():
            setattr(config, name, value)

    return Recipe(change)


RECIPES: dict[str, Recipe] = {
    "bamba": _sets(attn_layer_indices=[1]),
    "granitemoehybrid": _sets(layer_types=["linear_attention", "full_attention"]),
    "dots1": _sets(n_shared_experts=1),
    "diffusion_gemma_text": _sets(top_k_experts=2),
}
