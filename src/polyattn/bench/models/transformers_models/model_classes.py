"""Which class of transformers is the model of each of its configurations."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

__all__ = ["class_of", "config_class_of", "model_types"]

_AUTO = "transformers.models.auto"


def model_types() -> list[str]:
    """Return the names of all configurations that the installed transformers has."""
    return sorted(importlib.import_module(f"{_AUTO}.configuration_auto").CONFIG_MAPPING_NAMES)


def config_class_of(model_type: str) -> Any:
    """Return the configuration's class."""
    return importlib.import_module("transformers").CONFIG_MAPPING[model_type]


def class_of(model_type: str) -> Any:
    """Return the class of the bare model, else one with a head; LookupError if there is none."""
    config = config_class_of(model_type)
    auto = importlib.import_module(f"{_AUTO}.modeling_auto")
    tables = [name for name in vars(auto) if name.endswith("_MAPPING_NAMES")]
    tables.sort(key=lambda name: name != "MODEL_MAPPING_NAMES")
    transformers = importlib.import_module("transformers")
    for table in tables:
        if table == "CONFIG_MAPPING_NAMES" or model_type not in getattr(auto, table):
            continue
        named = getattr(auto, table)[model_type]
        for name in (named,) if isinstance(named, str) else named:
            found = getattr(transformers, name, None)
            if found is not None and getattr(found, "config_class", None) in (config, None):
                return found
    return _searched(config)


def _searched(config: Any) -> Any:
    """Return the model beside the configuration that says it is configured by it."""
    module = config.__module__.replace(".configuration_", ".modeling_")
    base = importlib.import_module("transformers").PreTrainedModel
    found: list[Any] = [
        one
        for _, one in inspect.getmembers(importlib.import_module(module), inspect.isclass)
        if issubclass(one, base)
        and one.__module__ == module
        and getattr(one, "config_class", None) is config
        and not one.__name__.endswith("PreTrainedModel")
        and "forward" in vars(one)
    ]
    if not found:
        raise LookupError(f"no model in {module} is configured by {config.__name__}")
    found.sort(key=lambda one: (not one.__name__.endswith("Model"), "For" in one.__name__))
    return found[0]
