"""``state_dict()`` of weights whose file was written to: an error, not the file's new bytes."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from polyattn.hooks.layerwise_offload.unit import Unit

__all__ = ["guarded"]


class _Guard:
    """Looks at the files of a unit before its weights are taken from it."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        unit = self._unit()
        if unit is not None and unit.shown is None:
            unit.home.check()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Leave a copied module, which has weights of its own, alone."""
        return _nothing_to_guard

    def __reduce__(self) -> Any:
        return _no_guard, ()


def _nothing_to_guard(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    return None


def _no_guard() -> Any:
    return _nothing_to_guard


def guarded(module: nn.Module, unit: Unit) -> list[Any]:
    """Have a module and all within it look before their ``state_dict()``; return the handles."""
    guard = _Guard(unit)
    return [part.register_state_dict_pre_hook(guard) for part in module.modules()]
