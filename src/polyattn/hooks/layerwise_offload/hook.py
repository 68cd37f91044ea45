"""The hooks that move weights: one brings a unit for its modules, one tells where a pass begins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from polyattn.errors import OffloadError
from polyattn.hooks.forward_hook import ForwardHook
from polyattn.hooks.layerwise_offload.engine import Engine, Use
from polyattn.hooks.layerwise_offload.saved_tensors import saving_references
from polyattn.hooks.layerwise_offload.unit import Unit
from polyattn.torch.internals import dispatch_modes, is_fake, keep_from_tracing, outside_transforms

__all__ = ["LayerwiseOffloadHook", "PassHook"]


class _Calls(threading.local):
    """The calls of this thread that have begun and not ended."""

    def __init__(self) -> None:
        self.open: list[Any] = []


class LayerwiseOffloadHook(ForwardHook):
    """Brings the weights of a module for each of its calls, and lets them go afterwards.

    `offload` makes and attaches one for each unit of a model. While the call runs, `unit` is on
    the device, and the next units are on their way.

    >>> import tempfile, torch
    >>> from polyattn.hooks import LayerwiseOffloadHook, ModuleHookManager, offload
    >>> blocks = [torch.nn.Linear(64, 64) for _ in range(4)]
    >>> model = torch.nn.Sequential(*blocks).eval().requires_grad_(False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with offload(model, device="cpu", disk=folder):
    ...         hook = ModuleHookManager.of(model[1]).get("layerwise_offload")
    ...         print(isinstance(hook, LayerwiseOffloadHook), hook.unit.name)
    True 1
    """

    def __init__(self, engine: Engine, unit: Unit) -> None:
        self.engine = engine
        self.unit = unit
        self._calls = _Calls()

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Bring the unit."""
        _refuse_without_values()
        with outside_transforms():
            use = self.engine.enter(self.unit)
        self._calls.open.append((use, saving_references(self.engine, self.unit)))
        return None

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Let it go."""
        self._end()

    def failed(self, module: nn.Module, exc: BaseException) -> None:
        """Let it go."""
        self._end()

    def mutate_params_scope(self) -> AbstractContextManager[Unit]:
        """Return a scope in which the unit is on the device, to be changed there.

        What was changed, in any way, goes home at its end.
        """
        return self.engine.using(self.unit)

    def _end(self) -> None:
        if not self._calls.open:
            return
        use: Use
        use, saving = self._calls.open.pop()
        if saving is not None:
            saving.__exit__(None, None, None)
        with outside_transforms():
            self.engine.leave(use)


class PassHook(ForwardHook):
    """Tells the engines that a pass through the model begins and ends."""

    def __init__(
        self, engines: Sequence[Engine], kind: str, first: Callable[[], None] = lambda: None
    ) -> None:
        """`kind`: a name for passes of this module. `first`: called before each."""
        self.engines = tuple(engines)
        self.kind = kind
        self._first = first

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin the pass."""
        _refuse_without_values()
        self._first()
        with outside_transforms():
            for engine in self.engines:
                engine.begin(self.kind)
        return None

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """End it."""
        with outside_transforms():
            for engine in self.engines:
                engine.end()

    def failed(self, module: nn.Module, exc: BaseException) -> None:
        """End it, and say of an error about devices what may be behind it."""
        for engine in self.engines:
            if isinstance(exc, RuntimeError) and "same device" in str(exc):
                exc.add_note(engine.hint())
            engine.end(failed=True)


def _refuse_without_values() -> None:
    """Raise where a model is only looked at, by tensors that have shapes and no values."""
    fake = dispatch_modes() > 0 and is_fake(torch.empty(0))
    if fake or torch.compiler.is_exporting():
        raise OffloadError(
            "got a call that only follows a model's shapes (torch.export, FakeTensorMode) while it "
            "is offloaded, expected one with values, for weights that come and go are no part of a "
            "program: call handle.detach() before, or export a model that is not offloaded"
        )


def _stay_out_of_graphs() -> None:
    """Compiled code calls these and goes on after them: what they move is no part of a graph."""
    for hook in (LayerwiseOffloadHook, PassHook):
        for method in (hook.pre_forward, hook.post_forward):
            keep_from_tracing(method)


_stay_out_of_graphs()
