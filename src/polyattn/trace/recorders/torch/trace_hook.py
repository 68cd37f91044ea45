"""The hook of one traced module, in eager calls and as an operator in compiled ones.

In eager code the hook tells the recorder. What torch.compile traces instead is one call of the
operator ``polyattn::trace_call`` where a module begins and one where it ends: it runs Python when
the compiled code comes to it, so shapes, steps and the order are those of the run. Its first
argument is a tensor that all hooks of a trace share and that it claims to change: no compiler may
leave such a call out or put two of them in another order.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from polyattn.hooks.forward_hook import ForwardHook
from polyattn.torch.internals import below_autograd, run_uncompiled
from polyattn.trace.recorders.torch.lines import head_of
from polyattn.trace.recorders.torch.tensor_paths import (
    NUMBERS,
    Unreadable,
    arguments,
    instead,
    outputs,
)

if TYPE_CHECKING:
    from polyattn.trace.recorders.torch.recorder import Recorder

__all__ = ["TraceHook"]

Others = Sequence[tuple[str, Any]]


class TraceHook(ForwardHook):
    """Tells `recorder` of every call of one module.

    `name`: the module's. `whole`: whether its tensors are kept whole. `after`: the hook of it that
    this one goes on for, in another trace. `first`: the number of its first call.
    """

    def __init__(
        self,
        recorder: Recorder,
        module: nn.Module,
        name: str,
        whole: bool,
        after: TraceHook | None = None,
    ) -> None:
        self.recorder = recorder
        self.module = weakref.ref(module)
        self.name = name
        self.head = head_of(name, type(module).__name__)
        self.whole = whole
        self.first: int = 0 if after is None else after.next_call()
        self.next_call: Callable[[], int] = itertools.count(self.first).__next__
        self.recorded_weights: dict[str, tuple[int, int]] = (
            {} if after is None else dict(after.recorded_weights)
        )
        self.order = recorder.order
        with torch.inference_mode(False):
            # A tensor, for torch.compile guards on numbers: blocks would not share their code.
            self.number = torch.tensor(next(_numbers))
        _hooks[int(self.number)] = self

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Record what goes in."""
        if is_dynamo_compiling():
            _call_in_graph(self, "in", arguments(args, kwargs))
        elif module is self.module():  # and not a replica that shares its hooks
            try:
                found: Any = arguments(args, kwargs)
            except Exception as error:  # the model goes on, whatever it is given
                found = [("args", Unreadable(args, error))]
            self.recorder.enter(self, found)

    def post_forward(self, module: nn.Module, output: Any) -> None:
        """Record what comes out."""
        if is_dynamo_compiling():
            _call_in_graph(self, "out", *outputs(output, "out"))
        elif module is self.module():
            try:
                tensors, others = outputs(output, "out")
                found: Any = [*tensors, *instead(others)] if others else tensors
            except Exception as error:
                found = [("out", Unreadable(output, error))]
            self.recorder.leave(self, found)

    def failed(self, module: nn.Module, exc: BaseException) -> None:
        """Forget the call; what was recorded in it stays."""
        if module is self.module():
            self.recorder.fail(self)


def _never_compile_alone() -> None:
    """Have the hook inlined into a graph or run by Python, never compiled as a frame of its own.

    That is what torch does to the hooks of a module whose forward alone is one graph.
    """
    for method in (TraceHook.pre_forward, TraceHook.post_forward):
        run_uncompiled(method, and_what_it_calls=True)


_never_compile_alone()

_numbers = itertools.count()
_hooks: weakref.WeakValueDictionary[int, TraceHook] = weakref.WeakValueDictionary()


def _call_in_graph(
    hook: TraceHook, phase: str, found: list[tuple[str, Tensor]], others: Others = ()
) -> None:
    """Of what is no tensor only the class is told: numbers may be those of a graph."""
    kinds = [
        f"{path}\t{'number' if isinstance(one, NUMBERS) else type(one).__name__}"
        for path, one in others
    ]
    what = "\n".join([phase, *[path for path, _ in found], *kinds])
    trace_call(hook.order, hook.number, [one for _, one in found], what)


def _run(order: Tensor, number: Tensor, tensors: list[Tensor], what: str) -> None:
    hook = _hooks.get(int(number))
    if hook is None:  # its trace has ended
        return
    phase, *paths = what.split("\n")
    found: list[tuple[str, Any]] = list(zip(paths, tensors, strict=False))
    for path, _, kind in (one.partition("\t") for one in paths[len(tensors) :]):
        found.append((path, Unreadable.no_tensor(kind)))
    if phase == "in":
        hook.recorder.enter(hook, found, compiled=True)
    else:
        hook.recorder.leave(hook, found, compiled=True)


def _below_autograd(order: Tensor, number: Tensor, tensors: list[Tensor], what: str) -> None:
    """A record is no part of what is differentiated."""
    with below_autograd():
        trace_call(order, number, tensors, what)


_library = torch.library.Library("polyattn", "FRAGMENT")
_library.define(
    "trace_call(Tensor(a!) order, Tensor number, Tensor[] tensors, str what) -> ()",
    # the values count in their logical order, so no compiler need copy them into another one
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
trace_call: Callable[[Tensor, Tensor, list[Tensor], str], None]
trace_call = torch.ops.polyattn.trace_call.default
_library.impl("trace_call", _run, "CompositeExplicitAutograd")
_library.impl("trace_call", _below_autograd, "Autograd")
torch.library.register_fake("polyattn::trace_call", lambda *_: None, lib=_library)
