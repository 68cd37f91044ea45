"""Kind: one way to get an operation wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyattn_faults.operations import Call

__all__ = ["Kind", "of", "second"]


@dataclass(frozen=True)
class Kind:
    """`name`; `operations`: the functions it is about; `fits`: whether it can be in a call that ran
    right; `wrong`: the result of the call as the bug would have it.

    >>> Kind("twice as much", ("softmax",), lambda call: True, lambda call: None).name
    'twice as much'
    """

    name: str
    operations: tuple[str, ...]
    fits: Callable[[Call], bool]
    wrong: Callable[[Call], Any]

    def possible(self, call: Call) -> bool:
        """Whether a call can have it."""
        return call.name in self.operations and self.fits(call)


def of(call: Call, at: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by its place or name."""
    return call.args[at] if len(call.args) > at else call.kwargs.get(name, default)


def second(call: Call) -> Any:
    """The second argument, a tensor or a number."""
    return of(call, 1, "other")


def floats(value: Any, dims: int = 1) -> bool:
    """Whether a value is a tensor of rounded numbers with at least so many dimensions."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= dims
