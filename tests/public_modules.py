"""Lists polyattn's public modules, for the tests that go over all of them."""

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from functools import cache
from types import ModuleType

import pytest

import polyattn
from polyattn import MissingDependency

FRAMEWORKS = {
    "torch",
    "jax",
    "jaxlib",
    "triton",
    "transformers",
    "diffusers",
    "matplotlib",
    "numpy",
}


@cache
def public_module_names() -> tuple[str, ...]:
    """Dotted names of all modules without a leading underscore, found without importing them."""
    return ("polyattn", *_below(list(polyattn.__path__), "polyattn."))


def _below(paths: list[str], prefix: str) -> Iterator[str]:
    for module in pkgutil.iter_modules(paths, prefix):
        leaf = module.name.rpartition(".")[2]
        if leaf.startswith("_"):
            continue
        yield module.name
        if module.ispkg:
            yield from _below([f"{path}/{leaf}" for path in paths], module.name + ".")


def import_or_skip(name: str) -> ModuleType:
    """Import a module; skip the test if a framework that the module is about is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in FRAMEWORKS:
            raise
        pytest.skip(f"{name} needs {error.name}, which is not installed")
    except MissingDependency:  # packages about a framework say themselves what they lack
        lacking = [each for each in ("torch", "jax") if importlib.util.find_spec(each) is None]
        if not lacking:
            raise
        pytest.skip(f"{name} needs {' or '.join(lacking)}, which is not installed")
