"""What is known of diffusers: its versions, and every name of it that is not public.

Nothing here is imported before :func:`require` is called, and nothing of diffusers is changed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from polyattn.errors import MissingDependency, Unsupported

__all__ = ["HOME", "NAME", "OLDEST", "TESTED", "Library", "library", "require", "ring_group"]

HOME = "diffusers.models.attention_dispatch"
"""The module that has the dispatcher."""
NAME = "polyattn"
OLDEST, TESTED = (0, 36), (0, 42)
"""The versions of diffusers, first and last, whose dispatcher this is written for."""

_INSTALL = f"pip install 'diffusers>={OLDEST[0]}.{OLDEST[1]},<={TESTED[0]}.{TESTED[1]}.*'"


class Library(NamedTuple):
    """The objects of the installed diffusers that the integration touches."""

    names: Any  # the enumeration of backends
    registry: Any
    templated: Callable[..., Any]


def require(untested: bool = False) -> None:
    """Raise unless a diffusers is installed whose dispatcher is the one that was tested.

    `untested`: any newer version will do, too.
    """
    for name, install in (("diffusers", _INSTALL), ("torch", "pip install 'polyattn[torch]'")):
        if importlib.util.find_spec(name) is None:
            raise MissingDependency(
                f"got no package {name}, expected it in order to register with diffusers: {install}"
            )
    found = importlib.metadata.version("diffusers")
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not (OLDEST <= numbers <= TESTED or (untested and numbers >= OLDEST)):
        hint = "" if numbers < OLDEST else ", or register(untested=True) at your own risk"
        raise Unsupported(
            f"got diffusers {found}, expected {OLDEST[0]}.{OLDEST[1]} to {TESTED[0]}.{TESTED[1]}, "
            f"with which this was tested; nothing was changed. {_INSTALL}{hint}."
        )


def library() -> Library:
    """Import and return what is used of diffusers."""
    home = vars(importlib.import_module(HOME))
    return Library(
        home["AttentionBackendName"],
        home["_AttentionBackendRegistry"],
        home["_templated_context_parallel_attention"],
    )


def ring_group(config: Any) -> Any:
    """Return the ranks of a context parallel configuration's ring, after diffusers set it up."""
    return vars(config)["_ring_mesh"].get_group()
