"""Feeding a port the reference's tensors (teacher forcing): two hooks around the trace's own.

The trace sees what the port computed; then the reference's tensor takes its place. So every value
that is recorded was computed from the reference's tensors alone, by the code between one module's
begin or end and the next.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyattn.hooks.forward_hook import ForwardHook, recomputing
from polyattn.hooks.manager import ModuleHookManager
from polyattn.torch.internals import version_of
from polyattn.trace.compare.counterparts import Key
from polyattn.trace.format.record import Record
from polyattn.trace.isolate.replacing import replaced, replaced_arguments
from polyattn.trace.isolate.rounding import moved
from polyattn.trace.isolate.whole_tensors import WholeTensors
from polyattn.trace.recorders.torch.model_trace import HOOK
from polyattn.trace.recorders.torch.per_thread import versions
from polyattn.trace.recorders.torch.tensor_paths import arguments

__all__ = ["Feed", "feeding"]


class Feed:
    """What to feed: the reference's record for tensors of the port. `fed`: where that was done.

    `forms`: tensors of the port that mean the same in another form. `dtype`: what tensors of a
    narrower one are widened to, where the port was. `noise`: of the port's tensors, where measured.
    """

    def __init__(
        self,
        records: Mapping[Key, Record],
        forms: frozenset[Key],
        values: WholeTensors,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._records, self._forms = records, forms
        self._values, self._dtype = values, dtype
        self._seed: int | None = None
        self.fed: set[Key] = set()
        self.noise: Mapping[Key, float] = {}

    @property
    def modules(self) -> set[str]:
        """The names of the port's modules that are fed anything; the model itself is widened."""
        return {key[0] for key in self._records} | ({""} if self._dtype is not None else set())

    def only(self, modules: set[str]) -> None:
        """Feed none but these modules of the port."""
        self._records = {key: one for key, one in self._records.items() if key[0] in modules}

    def perturbed(self, seed: int) -> Feed:
        """Return one that feeds the same tensors, each moved by a rounding of its dtype."""
        made = Feed(self._records, self._forms, self._values, self._dtype)
        made._seed = seed
        return made

    def marks(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """What is said in a record's line: whether its tensor was replaced, its noise."""
        key = record["module"], record["call"], record["phase"], record["tensor"]
        said: dict[str, Any] = {"forced": True} if key in self.fed else {}
        if key in self._forms:
            said["form"] = True
        if key in self.noise:
            said["noise"] = self.noise[key]
        return said

    def tensor(self, key: Key, t: Tensor) -> Tensor | None:
        """Return the reference's tensor in the form of the port's `t`; None where there is none."""
        if type(t) not in (Tensor, nn.Parameter):
            return None
        record, dtype = self._records.get(key), self._wider(t)
        if record is None:
            return None if dtype is t.dtype else t.detach().to(dtype)
        found = self._values.get(record)
        if found.numel() != t.numel() or found.is_floating_point() != t.is_floating_point():
            return None
        if self._seed is not None:
            found = moved(found, f"{self._seed} {key}")
        with torch.no_grad():
            new = torch.empty_like(t, dtype=dtype, requires_grad=False)
            new.copy_(found.reshape(t.shape))
        self.fed.add(key)
        return new

    def _wider(self, t: Tensor) -> torch.dtype:
        narrow = self._dtype is not None and t.is_floating_point()
        if narrow and self._dtype is not None and t.dtype.itemsize < self._dtype.itemsize:
            return self._dtype
        return t.dtype


@contextmanager
def feeding(model: nn.Module, feed: Feed) -> Iterator[None]:
    """Feed a traced model's modules while this is on."""
    with ExitStack() as stack:
        modules = dict(model.named_modules(remove_duplicate=False))
        for name in sorted(feed.modules & modules.keys()):
            manager = ModuleHookManager.of(modules[name])
            if HOOK not in manager or _OUTPUTS in manager:
                continue
            hook: Any = manager.get(HOOK)
            outputs = _Outputs(feed, name, hook.first)
            stack.enter_context(manager.attach(_OUTPUTS, outputs, before=HOOK))
            stack.enter_context(manager.attach(_INPUTS, _Inputs(outputs), after=HOOK))
        yield


_OUTPUTS, _INPUTS = "polyattn.isolate.outputs", "polyattn.isolate.inputs"


@dataclass(slots=True)
class _Given:
    """A tensor that was fed in the place of the caller's, to see whether the module changed it."""

    caller: Tensor
    new: Tensor
    version: int


class _Calls(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[int, list[tuple[str, Tensor, int]]]] = []


class _Outputs(ForwardHook):
    """The outer of the two: counts the calls as the trace does, feeds what comes out, also in
    arguments that the module changed in place.
    """

    def __init__(self, feed: Feed, name: str, first: int) -> None:
        self.feed, self.name = feed, name
        self.calls = _Calls()
        self._next = itertools.count(first).__next__

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Count the call."""
        call = -1 if recomputing() else self._next()
        self.calls.stack.append((call, versions(arguments(args, kwargs))))

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return what the reference returned, and leave what it left."""
        call, given = self.calls.stack.pop()
        for path, t, version in given:
            if version_of(t) == version:
                continue
            found = self.feed.tensor((self.name, call, "out", path), t)
            if found is not None:
                with torch.no_grad():
                    t.copy_(found)
        return replaced(
            output, "out", lambda path, t: self.feed.tensor((self.name, call, "out", path), t)
        )

    def failed(self, module: nn.Module, exc: BaseException) -> None:
        """Forget the call."""
        self.calls.stack.pop()


class _Inputs(ForwardHook):
    """The inner of the two: feeds what goes in."""

    def __init__(self, outputs: _Outputs) -> None:
        self._outputs = outputs
        self._running = threading.local()

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what the reference was given."""
        feed, name = self._outputs.feed, self._outputs.name
        call, _ = self._outputs.calls.stack[-1]
        given: list[_Given] = []

        def new(path: str, t: Tensor) -> Tensor | None:
            found = feed.tensor((name, call, "in", path), t)
            if found is not None and not found.is_inference():
                given.append(_Given(t, found, version_of(found)))
            return found

        result = replaced_arguments(args, kwargs, new)
        self._stack().append(given)
        return result

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Let the caller have what the module did to its arguments in place."""
        for one in self._stack().pop():
            if version_of(one.new) != one.version:
                with torch.no_grad():
                    one.caller.copy_(one.new)
        return output

    def failed(self, module: nn.Module, exc: BaseException) -> None:
        """Forget the call."""
        self._stack().pop()

    def _stack(self) -> list[list[_Given]]:
        if not hasattr(self._running, "stack"):
            self._running.stack = []
        stack: list[list[_Given]] = self._running.stack
        return stack
