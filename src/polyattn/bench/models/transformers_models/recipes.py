"""What some models need beside what all of them get, to be built small and to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

__all__ = ["RECIPES", "Recipe"]


class Recipe(NamedTuple):
    """A change of the small configuration, and inputs that the model takes."""

    change: Callable[[Any], None] | None = None
    inputs: Callable[[Any], Iterator[dict[str, Any]]] | None = None


RECIPES: dict[str, Recipe] = {}
