"""Putting other tensors into what a module is called with or returns, by their paths.

The paths are those of :mod:`polyattn.trace.recorders.torch.tensor_paths`. Nothing is changed in
place: a container that holds a new tensor is a new one of its kind.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from polyattn.trace.recorders.torch.tensor_paths import DEPTH, NUMBERS, SCALARS, as_tensor, step_of

__all__ = ["replaced", "replaced_arguments"]

New = Callable[[str, Tensor], Tensor | None]


def replaced_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], new: New
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with `new` of each path and tensor in the place of that tensor.

    >>> import torch
    >>> zero = lambda path, t: t * 0 if path == "kwargs.b[0]" else None
    >>> replaced_arguments((torch.ones(1),), {"b": [torch.ones(1)]}, zero)
    ((tensor([1.]),), {'b': [tensor([0.])]})
    """
    return (
        tuple(replaced(value, f"args[{index}]", new) for index, value in enumerate(args)),
        {name: replaced(value, f"kwargs.{name}", new) for name, value in kwargs.items()},
    )


def replaced(value: Any, path: str, new: New, depth: int = DEPTH) -> Any:
    """Return `value`, whose own path is `path`, with new tensors; itself where there is none."""
    if isinstance(value, Tensor):
        found = new(path, value)
        return value if found is None else found
    if type(value) in (*NUMBERS, bool) and path.startswith("out"):
        return _number(value, path, new)
    if depth == 0 or isinstance(value, SCALARS):
        return value
    if isinstance(value, dict | Mapping):
        return _mapping(value, path, new, depth)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _named_tuple(value, path, new, depth)
    if isinstance(value, tuple | list):
        several = [
            replaced(one, f"{path}[{index}]", new, depth - 1) for index, one in enumerate(value)
        ]
        return value if _same(several, value) else type(value)(several)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, path, new, depth)
    return value


def _number(value: float, path: str, new: New) -> float:
    """A number that a module returned, which is recorded as a tensor."""
    try:
        found = new(path, as_tensor(value))
    except (OverflowError, RuntimeError):  # one that no tensor holds is not recorded
        return value
    return value if found is None else type(value)(found.item())


def _named_tuple(value: Any, path: str, new: New, depth: int) -> Any:
    changed = {
        name: replaced(one, f"{path}.{name}", new, depth - 1)
        for name, one in zip(value._fields, value, strict=False)
    }
    return value if _same(changed.values(), value) else value._replace(**changed)


def _mapping(value: Any, path: str, new: New, depth: int) -> Any:
    changed = {
        key: one
        for key, old in value.items()
        if (one := replaced(old, path + step_of(key), new, depth - 1)) is not old
    }
    if not changed:
        return value
    made = copy.copy(value)
    for key, one in changed.items():
        made[key] = one
    return made


def _dataclass(value: Any, path: str, new: New, depth: int) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        one = replaced(old, f"{path}.{field.name}", new, depth - 1)
        if one is not old:
            changed[field.name] = one
    if not changed:
        return value
    made = copy.copy(value)
    for name, one in changed.items():
        object.__setattr__(made, name, one)  # a frozen one too
    return made


def _same(found: Any, value: Any) -> bool:
    return all(one is old for one, old in zip(found, value, strict=False))
