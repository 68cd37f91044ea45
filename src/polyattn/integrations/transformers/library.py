"""What is known of transformers: its versions, and every name of it that is not public.

Nothing here is imported before :func:`require` is called, and nothing of transformers is changed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, MutableMapping
from types import CodeType
from typing import Any, NamedTuple

from polyattn.errors import MissingDependency, Unsupported

__all__ = [
    "HOME",
    "NAME",
    "OLDEST",
    "PAGED_NAME",
    "TESTED",
    "Library",
    "configures_eager_only",
    "implementation_of",
    "is_eager_only",
    "library",
    "note_support",
    "require",
    "supports_interface",
]

HOME = "transformers.modeling_utils"
"""The module that every model of transformers imports."""

NAME = "polyattn"
PAGED_NAME = f"paged|{NAME}"
"""The name under which versions before 5.19 ask for the implementation in continuous batching."""

OLDEST, TESTED = (5, 6), (5, 23)
"""The versions of transformers, first and last, that the tests of this package were run with."""

_INSTALL = f"pip install 'transformers>={OLDEST[0]}.{OLDEST[1]},<={TESTED[0]}.{TESTED[1]}.*'"


class Library(NamedTuple):
    """The objects of the installed transformers that the integration touches."""

    attention: MutableMapping[str, Any]
    masks: MutableMapping[str, Any]
    pretrained: Any
    batching: Any
    paged_cache: Any
    masking: Any
    joined: CodeType
    is_tracing: Callable[..., bool]


def require(untested: bool = False) -> None:
    """Raise unless a transformers is installed whose interface is the one that was tested.

    `untested`: any version will do that has the interface at all.
    """
    for name, install in (("transformers", _INSTALL), ("torch", "pip install 'polyattn[torch]'")):
        if importlib.util.find_spec(name) is None:
            raise MissingDependency(
                f"got no package {name}, expected it in order to register with transformers: "
                f"{install}"
            )
    found = importlib.metadata.version("transformers")
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not (OLDEST <= numbers <= TESTED or (untested and numbers >= OLDEST)):
        hint = "" if numbers < OLDEST else ", or register(untested=True) at your own risk"
        raise Unsupported(
            f"got transformers {found}, expected {OLDEST[0]}.{OLDEST[1]} to "
            f"{TESTED[0]}.{TESTED[1]}, with which this was tested; nothing was changed. "
            f"{_INSTALL}{hint}."
        )


_found: Library | None = None


def library() -> Library:
    """Import and return what is used of transformers."""
    global _found
    if _found is None:
        modeling = importlib.import_module(HOME)
        masking = importlib.import_module("transformers.masking_utils")
        batching = importlib.import_module(
            "transformers.generation.continuous_batching.continuous_api"
        )
        cache = importlib.import_module("transformers.generation.continuous_batching.cache")
        imports = importlib.import_module("transformers.utils.import_utils")
        _found = Library(
            vars(modeling.AttentionInterface)["_global_mapping"],
            vars(masking.AttentionMaskInterface)["_global_mapping"],
            modeling.PreTrainedModel,
            batching.ContinuousBatchingManager,
            cache.PagedAttentionCache,
            masking,
            masking.and_masks().__code__,
            imports.is_tracing,
        )
    return _found


def implementation_of(config: Any) -> str | None:
    """Return the attention implementation that a model's config names."""
    return getattr(config, "_attn_implementation", None)


def supports_interface(model: Any) -> bool:
    """Say whether a model's code hands its attention to the interface: all of it, or none.

    The library's own flag is False for many that do; what it asks of a class before it changes an
    implementation is told by the class's source. A table of classes by implementation has no row
    for ours.
    """
    kind = model if isinstance(model, type) else type(model)
    if _has_own_table(kind.__module__) or _takes_back(kind):
        return False
    if getattr(kind, "_supports_attention_backend", False):
        return True
    told = getattr(kind, "_can_set_attn_implementation", None)
    return bool(told is not None and told())


def _takes_back(kind: Any) -> bool:
    """Say whether a class says no to the interface where the class that it is made of says yes.

    Its source does not tell: beside it, in one file, are models that use the interface.
    """
    flag = "_supports_attention_backend"
    said = [vars(base)[flag] for base in kind.__mro__ if flag in vars(base)]
    return bool(said) and not said[0] and any(said[1:])


_eager_only: set[str] = set()


def note_support(model: Any) -> None:
    """Remember of a model that is set to ours whether the library runs it on eager alone."""
    kind = model if isinstance(model, type) else type(model)
    others = ("sdpa", "flash_attn", "flex_attn", "attention_backend")
    if not any(getattr(kind, f"_supports_{other}", False) for other in others):
        _eager_only.add(kind.__module__)


def is_eager_only(module: Any) -> bool:
    """Say whether a layer is of a model that the library runs on eager attention alone.

    What such a layer says of itself, eager never reads.
    """
    return type(module).__module__ in _eager_only


def configures_eager_only(config: Any) -> bool:
    """Say whether a configuration is of a model that the library runs on eager attention alone."""
    return type(config).__module__.replace(".configuration_", ".modeling_") in _eager_only


_TABLE = re.compile(r"_ATTENTION_CLASSES\[\s*config\._attn_implementation\s*\]")


@functools.cache
def _has_own_table(module: str) -> bool:
    found = sys.modules.get(module)
    try:
        return found is not None and bool(_TABLE.search(inspect.getsource(found)))
    except (OSError, TypeError):
        return False
