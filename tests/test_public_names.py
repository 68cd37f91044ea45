"""`__all__` of a package is exactly what the package offers; the promised names are in it."""

import importlib.metadata
import importlib.resources
import types

import pytest

import polyattn
from tests.public_modules import import_or_skip, public_module_names

PROMISED = {
    "polyattn": {
        *("Full", "Causal", "Window", "Padding", "Packed", "Segments", "PrefixLM", "BlockMap"),
        *("Dense", "DenseBias", "Alibi", "Problem"),
        *("use_backend", "set_backend", "record_selections", "numpy_attention"),
    },
    "polyattn.torch": {"attention", "explain", "plan", "scaled_dot_product_attention"},
    "polyattn.torch.flags": {
        *("flags", "snapshot", "diff", "apply", "table", "sdpa_priority"),
        *("deterministic", "fastest", "full_precision"),
    },
    "polyattn.hooks": {
        *("ForwardHook", "ModuleHookManager", "ActivationStatHook", "JsonlSink"),
        *("trace", "attach_activation_trace", "trace_step"),
    },
    "polyattn.jax.flags": {"table", "snapshot", "diff"},
}


def public_names(module: types.ModuleType) -> set[str]:
    """Names without underscore that are not submodules or markers of `from __future__`."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and type(value).__module__ != "__future__"
    }


@pytest.mark.parametrize("name", public_module_names())
def test_all_names_exist_once(name: str) -> None:
    module = import_or_skip(name)
    declared = list(getattr(module, "__all__", ()))
    assert len(declared) == len(set(declared)), f"{name}.__all__ names something twice"
    missing = [entry for entry in declared if not hasattr(module, entry)]
    assert not missing, f"{name}.__all__ names what {name} does not have: {missing}"
    private = [entry for entry in declared if entry.startswith("_") and entry != "__version__"]
    assert not private, f"{name}.__all__ names what is private: {private}"


@pytest.mark.parametrize("name", public_module_names())
def test_package_offers_exactly_its_all(name: str) -> None:
    module = import_or_skip(name)
    if not hasattr(module, "__path__") or not hasattr(module, "__all__"):
        pytest.skip("not a package with __all__")
    unlisted = public_names(module) - set(module.__all__)
    assert not unlisted, (
        f"{name} has public names outside __all__; list them or give them a leading underscore"
    )


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_promised_names_are_listed(name: str) -> None:
    module = import_or_skip(name)
    assert set(module.__all__) >= PROMISED[name]


def test_version_is_that_of_the_distribution() -> None:
    assert polyattn.__version__ == importlib.metadata.version("polyattn")


def test_package_is_marked_as_typed() -> None:
    assert (importlib.resources.files("polyattn") / "py.typed").is_file()
