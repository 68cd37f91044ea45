"""Which transformers diffusers has, and how each is built small.

``recipes.json`` has a configuration of each class and what its inputs look like: shapes, dtypes,
and values where they mean something. Most are those of the tiny models of the library's own tests
(https://github.com/huggingface/diffusers, tests/models/transformers, Apache 2.0).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from importlib.resources import files
from typing import Any

__all__ = ["class_of", "model_types", "recipe_of"]


def model_types() -> list[str]:
    """Return the names of all transformers of the installed diffusers.

    Where a class is built in two ways, a colon and the way follow.
    """
    home = importlib.import_module("diffusers.models.transformers")
    base = importlib.import_module("diffusers").ModelMixin
    found = {
        name for name, one in inspect.getmembers(home, inspect.isclass) if issubclass(one, base)
    }
    return sorted(found | {name for name in _recipes() if name.partition(":")[0] in found})


def class_of(name: str) -> Any:
    """Return the class."""
    home = importlib.import_module("diffusers.models.transformers")
    return getattr(home, name.partition(":")[0])


def recipe_of(name: str) -> dict[str, Any]:
    """Return `config` and `inputs`; LookupError where there is no recipe."""
    if name not in _recipes():
        raise LookupError("there is no recipe for a small one of it")
    return _recipes()[name]


@functools.cache
def _recipes() -> dict[str, Any]:
    text = files("polyattn.bench.models.diffusers_models").joinpath("recipes.json")
    found: dict[str, Any] = json.loads(text.read_text(encoding="utf-8"))
    return found
