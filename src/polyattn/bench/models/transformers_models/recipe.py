"""What a recipe is: what one model needs beside what all of them get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

__all__ = ["Recipe", "sets", "takes"]


class Recipe(NamedTuple):
    """A change of the small configuration, and inputs that the model takes.

    `start` makes the configuration to be made small, of a kind whose default none can be built of.
    `kind` names the class, where the bare model leaves out what attends.
    `beside` names the library's attention that the model is run on, where it has no eager one.
    """

    change: Callable[[Any], None] | None = None
    inputs: Callable[[Any], Iterator[dict[str, Any]]] | None = None
    start: Callable[[], Any] | None = None
    kind: str = ""
    beside: str = "eager"


def sets(**values: Any) -> Recipe:
    """Return a change that sets these fields; ``part__field`` is one of a part."""

    def change(config: Any) -> None:
        for name, value in values.items():
            *parts, field = name.split("__")
            of = config
            for part in parts:
                of = getattr(of, part)
            setattr(of, field, value)

    return Recipe(change)


def takes(inputs: Callable[[Any], dict[str, Any]], change: Recipe | None = None) -> Recipe:
    """Return a recipe of inputs, which are made of the model's configuration."""
    return Recipe(change and change.change, lambda model: iter([inputs(model.config)]))
