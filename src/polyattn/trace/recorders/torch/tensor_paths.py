"""The tensors in what a module is called with and returns, each with its path.

Tuples, lists, dictionaries, named tuples, dataclasses and what derives from them (ModelOutput of
transformers, BaseOutput of diffusers) are looked into; other objects are not. torch.compile traces
this too, so it stays plain. Of what a module returns, what is no tensor is found as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "DEPTH", "NUMBERS", "SCALARS", "Unreadable", "arguments", "as_tensor", "instead", "leaves",
    "outputs", "step_of",
]  # fmt: skip

Leaves = list[tuple[str, Tensor]]
Others = list[tuple[str, Any]]

DEPTH = 8
"""How many containers inside each other are looked into."""
_LONGEST, _LONGEST_NAME = 200, 400
"""Characters of a step of a path, of a key and of an attribute: a reader takes 4096 in all."""
_MANY = 16
"""From how many numbers or texts on a list of nothing else is not recorded one by one."""


class Unreadable:
    """Stands for a value that could not be looked into: its class is `kind`."""

    __slots__ = ("error", "kind")

    def __init__(self, value: object, error: Exception) -> None:
        self.kind, self.error = type(value).__name__, error

    @classmethod
    def no_tensor(cls, kind: str) -> Unreadable:
        """Return what stands for an object of that class, which is not looked into."""
        found = cls(None, TypeError("no tensor"))
        found.kind = kind
        return found


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
            found.append((f"kwargs.{name[:_LONGEST_NAME]}", value))
        elif not isinstance(value, SCALARS):
            _walk(value, f"kwargs.{name[:_LONGEST_NAME]}", found, DEPTH)
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


def outputs(value: Any, path: str) -> tuple[Leaves, Others]:
    """Return the tensors in what a module returned, and what else is in it but None.

    >>> outputs([torch.ones(1), 2.5, None, "text"], "out")
    ([('out[0]', tensor([1.]))], [('out[1]', 2.5), ('out[3]', 'text')])
    """
    if isinstance(value, Tensor):
        return [(path, value)], []
    found: Leaves = []
    others: Others = []
    _walk(value, path, found, DEPTH, others)
    return found, others


def instead(others: Others) -> list[tuple[str, Any]]:
    """Return what is recorded of what is no tensor: of a number its tensor, of anything else that
    it is not read, so that nobody takes it for compared.
    """
    return [(path, _instead(value)) for path, value in others]


def _instead(value: Any) -> Tensor | Unreadable:
    if isinstance(value, NUMBERS):
        try:
            return as_tensor(value)
        except (OverflowError, RuntimeError) as error:
            return Unreadable(value, error)
    return Unreadable.no_tensor(type(value).__name__)


def as_tensor(value: float) -> Tensor:
    """Return a number of Python's as the tensor that is recorded of it.

    >>> as_tensor(2), as_tensor(True), as_tensor(0.1)
    (tensor(2), tensor(True), tensor(0.1000, dtype=torch.float64))
    """
    dtype = torch.float64 if isinstance(value, float) else None
    return torch.tensor(value, dtype=dtype, device="cpu")


NUMBERS = (int, float)
SCALARS = (str, int, float, bool, bytes, type(None))


def _walk(value: Any, path: str, found: Leaves, depth: int, others: Others | None = None) -> None:
    if isinstance(value, Tensor):
        found.append((path, value))
    elif depth == 0 or isinstance(value, SCALARS):
        if others is not None and value is not None:
            others.append((path, value))
    elif isinstance(value, dict | Mapping):
        for key, one in value.items():
            _walk(one, path + step_of(key), found, depth - 1, others)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name, one in zip(value._fields, value, strict=False):
            _walk(one, f"{path}.{name[:_LONGEST_NAME]}", found, depth - 1, others)
    elif isinstance(value, tuple | list):
        if others is not None and len(value) >= _MANY and _plain(value):
            others.append((path, value))
            return
        for index, one in enumerate(value):
            _walk(one, f"{path}[{index}]", found, depth - 1, others)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            one = getattr(value, field.name, None)
            _walk(one, f"{path}.{field.name[:_LONGEST_NAME]}", found, depth - 1, others)
    elif others is not None:
        others.append((path, value))


def _plain(values: tuple[Any, ...] | list[Any]) -> bool:
    first = isinstance(values[0], SCALARS) and values[0] is not None
    return first and all(isinstance(one, SCALARS) for one in values)


def step_of(key: Any) -> str:
    """Return what a key of a mapping adds to the path."""
    if isinstance(key, str) and key.isidentifier():
        return f".{key}"[:_LONGEST]
    return f"[{key!r}]"[:_LONGEST]
