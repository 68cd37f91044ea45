"""The moment between the calls of a model, in which its weights may go elsewhere.

A kernel takes the address of a tensor's memory when it begins, and threads that are within a call
know nothing of hooks that come later: so other threads' new calls are held back, and those that go
on are waited for: the modules that they call tell that they do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from polyattn.hooks.layerwise_offload.compiled_blocks import is_compiled_alone

__all__ = ["between_calls"]

QUIET_S = 0.05
"""Calls that go on are over when none of them has called a module for so long."""
LONGEST_S = 10.0
"""And so long they are waited for at the most."""


@contextmanager
def between_calls(model: nn.Module) -> Iterator[None]:
    """Hold other threads' calls of a model back within the scope, after those that go on."""
    if threading.active_count() == 1:
        yield
        return
    gate = _Gate(model)
    with ExitStack() as hooks:
        hooks.callback(gate.open.set)
        for module in model.modules():
            # a compiled one would be compiled again for a hook, a scripted one takes none
            if not is_compiled_alone(module) and not isinstance(module, torch.jit.ScriptModule):
                hook = module.register_forward_pre_hook(gate.hold, prepend=True)
                hooks.callback(hook.remove)
        gate.drain()
        yield


class _Gate:
    """Holds new calls of other threads back, and hears of those that go on."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.open = threading.Event()
        self._owner = threading.get_ident()
        self._heard = time.monotonic()

    def hold(self, module: nn.Module, args: Any) -> None:
        """Have another thread's call of the model wait; calls of its parts belong to older ones."""
        if threading.get_ident() == self._owner or self.open.is_set():
            return
        if module is self._model:
            self.open.wait()
        else:
            self._heard = time.monotonic()

    def drain(self) -> None:
        """Wait until nothing is heard any more."""
        end = time.monotonic() + LONGEST_S
        while (now := time.monotonic()) < min(end, self._heard + QUIET_S):
            time.sleep(min(end, self._heard + QUIET_S) - now)
