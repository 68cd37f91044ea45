"""``model.to(...)`` of an offloaded model: dtypes change, weights stay where they stream from.

Torch moves a module by asking each part to apply a function to its tensors. For the modules of a
unit that is ours, so that `.to("cuda")` does not bring the whole model onto the device.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from polyattn.hooks.layerwise_offload.unit import Unit
from polyattn.torch.internals import apply_to_module, applying_method

__all__ = ["Placement"]


class Placement:
    """Stands for a module's own way of applying a function, until `remove`."""

    def __init__(self, module: nn.Module, unit: Unit) -> None:
        self._module = weakref.ref(module)
        self._unit = unit
        rest = dict(module.__dict__)
        module.__dict__.clear()  # first: who copies the module comes here before the weights
        module.__dict__.update({applying_method: self, **rest})

    def __call__(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        module = self._module()
        assert module is not None
        streamed = {id(leaf.outer) for leaf in self._unit.leaves}

        def where_it_is(tensor: Tensor) -> Tensor:
            changed = function(tensor)
            if id(tensor) not in streamed or changed.device == tensor.device:
                return changed
            if changed.is_meta:  # it has no values to bring back
                return tensor
            return changed.to(tensor.device)

        return apply_to_module(module, where_it_is, recurse)

    def remove(self) -> None:
        """Let the module have its own way again."""
        module = self._module()
        if module is not None and module.__dict__.get(applying_method) is self:
            del module.__dict__[applying_method]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Give a copied module its own way."""
        self._check()  # it copies the weights too
        return _own_way(memo.get(id(self._module())))

    def __reduce__(self) -> tuple[Any, ...]:
        self._check()
        return _own_way, (self._module(),)

    def _check(self) -> None:
        if not self._unit.home.is_closed:  # a unit that stays has its weights in memory
            self._unit.home.check()


def _own_way(module: Any) -> Any:
    if module is None:
        return None
    return types.MethodType(getattr(type(module), applying_method), module)
