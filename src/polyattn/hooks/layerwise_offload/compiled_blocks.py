"""Blocks compiled in place (``block.compile()``): their weights come before the graph runs.

Such a block's hooks are part of what is compiled, and moving weights is nothing that a graph can
hold. So the call of the compiled block is what is wrapped, and no hook is in its way.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from polyattn.hooks.layerwise_offload.hook import LayerwiseOffloadHook
from polyattn.torch.internals import compiled_call, set_compiled_call

__all__ = ["AroundCompiled", "is_compiled_alone"]


def is_compiled_alone(module: nn.Module) -> bool:
    """Whether a module was compiled in place and its compiled call is not wrapped yet."""
    found = compiled_call(module)
    return found is not None and not isinstance(found, AroundCompiled)


class AroundCompiled:
    """Stands for a module's compiled call, until `remove`: brings the unit, calls, lets it go."""

    def __init__(self, module: nn.Module, hook: LayerwiseOffloadHook) -> None:
        self._module = weakref.ref(module)
        self._hook = hook
        self._compiled = compiled_call(module)
        set_compiled_call(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        self._hook.pre_forward(module, *args, **kwargs)
        try:
            output = self._compiled(*args, **kwargs)
        except BaseException as error:
            self._hook.failed(module, error)
            raise
        self._hook.post_forward(module, output)
        return output

    def detach(self) -> None:
        """Let the module call what was compiled; what was compiled anew meanwhile stays."""
        module = self._module()
        if module is not None and compiled_call(module) is self:
            set_compiled_call(module, self._compiled)
