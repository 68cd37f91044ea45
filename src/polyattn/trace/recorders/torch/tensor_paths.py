"""The tensors in what a module is called with and returns, each with its path.

Tuples, lists, dictionaries, named tuples, dataclasses and what derives from them (ModelOutput of
transformers, BaseOutput of diffusers) are looked into; other objects are not. torch.compile traces
this too, so it stays plain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["DEPTH", "SCALARS", "Unreadable", "arguments", "leaves", "step_of"]

Leaves = list[tuple[str, Tensor]]

DEPTH = 8
"""How many containers inside each other are looked into."""
_LONGEST = 200


class Unreadable:
    """Stands for a value that could not be looked into: its class is `kind`."""

    __slots__ = ("error", "kind")

    def __init__(self, value: object, error: Exception) -> None:
        self.kind, self.error = type(value).__name__, error


def arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Leaves:
    """Return the tensors of a call's arguments: ``args[0]``, ``kwargs.mask``, ...

    >>> import torch
    >>> [path for path, _ in arguments((torch.ones(1), [torch.ones(1)]), {"mask": torch.ones(1)})]
    ['args[0]', 'args[1][0]', 'kwargs.mask']
    """
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
        return [("args[0]", args[0])]
    found: Leaves = []
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            found.append((f"args[{index}]", value))
        elif not isinstance(value, SCALARS):
            _walk(value, f"args[{index}]", found, DEPTH)
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            found.append((f"kwargs.{name}", value))
        elif not isinstance(value, SCALARS):
            _walk(value, f"kwargs.{name}", found, DEPTH)
    return found


def leaves(value: Any, path: str) -> Leaves:
    """Return the tensors in `value`, whose own path is `path`.

    >>> import torch
    >>> [where for where, _ in leaves({"logits": torch.ones(1), "states": (torch.ones(1),)}, "out")]
    ['out.logits', 'out.states[0]']
    """
    if isinstance(value, Tensor):
        return [(path, value)]
    found: Leaves = []
    _walk(value, path, found, DEPTH)
    return found


SCALARS = (str, int, float, bool, bytes, type(None))


def _walk(value: Any, path: str, found: Leaves, depth: int) -> None:
    if isinstance(value, Tensor):
        found.append((path, value))
        return
    if depth == 0 or isinstance(value, SCALARS):
        return
    if isinstance(value, dict | Mapping):
        for key, one in value.items():
            _walk(one, path + step_of(key), found, depth - 1)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name, one in zip(value._fields, value, strict=False):
            _walk(one, f"{path}.{name}", found, depth - 1)
    elif isinstance(value, tuple | list):
        for index, one in enumerate(value):
            _walk(one, f"{path}[{index}]", found, depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _walk(getattr(value, field.name, None), f"{path}.{field.name}", found, depth - 1)


def step_of(key: Any) -> str:
    """Return what a key of a mapping adds to the path."""
    if isinstance(key, str) and key.isidentifier():
        return f".{key}"[:_LONGEST]
    return f"[{key!r}]"[:_LONGEST]
