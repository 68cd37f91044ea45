"""ActivationStatHook: the statistics of one module's outputs, attached by hand."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from polyattn.hooks.forward_hook import ForwardHook, recomputing
from polyattn.trace.format.record import UNKNOWN
from polyattn.trace.format.sink import JsonlSink
from polyattn.trace.recorders.torch.readable_tensors import joined, plain, without_values
from polyattn.trace.recorders.torch.step import current_step
from polyattn.trace.recorders.torch.tensor_paths import Unreadable, leaves
from polyattn.trace.recorders.torch.tensor_statistics import record_fields, tensor_statistics
from polyattn.trace.recorders.torch.user_statistics import own_statistics, plain_fields, said
from polyattn.trace.recorders.torch.what_to_record import choose_statistics, choose_steps

__all__ = ["ActivationStatHook"]

_LONGEST = 160

Stats = Iterable[str | tuple[str, Callable[[Tensor], Any]]]


class ActivationStatHook(ForwardHook):
    """Writes statistics of a module's outputs into a sink, a record for each tensor.

    For one module and statistics of your own; :func:`polyattn.hooks.trace` records whole models, at
    a fraction of the cost. `module_name`: what the records call the module. `stats`: names of the
    format's statistics, or (name, function of the tensor) pairs; None is all of the format's.
    `sink`: a JsonlSink, which may serve several hooks. `step_filter`: the steps of
    :func:`trace_step` to record, None for all. It waits for the device at each tensor, and compiled
    code is cut in two at it.

    >>> import tempfile, torch
    >>> from polyattn.hooks import ActivationStatHook, JsonlSink, ModuleHookManager
    >>> path = tempfile.mkdtemp() + "/stats.jsonl"
    >>> module = nn.Linear(2, 2)
    >>> with JsonlSink(path) as sink, ModuleHookManager.of(module) as manager:
    ...     stats = ["max", ("median", lambda t: t.float().median())]
    ...     hook = ActivationStatHook("proj", stats, sink, step_filter=None)
    ...     handle = manager.attach("stats", hook)
    ...     _ = module(torch.zeros(1, 2))
    >>> import json
    >>> from pathlib import Path
    >>> sorted(json.loads(Path(path).read_text()))
    ['call', 'cls', 'dtype', 'max', 'median', 'module', 'phase', 'seq', 'shape', 'step', 'tensor']
    """

    def __init__(
        self, module_name: str, stats: Stats | None, sink: JsonlSink, step_filter: Any = None
    ) -> None:
        self.module_name = module_name
        self.sink = sink
        self._chosen = choose_statistics(stats)
        self._steps = choose_steps(step_filter)
        self._next_call = itertools.count().__next__

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Record every tensor of the output."""
        self._record(module, output)
        return output

    def _record(self, module: nn.Module, output: Any) -> None:
        if recomputing():
            return
        call, step = self._next_call(), current_step()
        if self._steps is not None and step not in self._steps:
            return
        try:
            found: Any = leaves(output, "out")
        except Exception as error:
            found = [("out", Unreadable(output, error))]
        for path, t in found:
            record = {
                "seq": _next_seq(self.sink), "module": self.module_name,
                "cls": type(module).__name__, "call": call, "step": step, "phase": "out",
                "tensor": path,
            }  # fmt: skip
            said = self._described(t)
            if said is not None:
                self.sink.write(record | said)

    def _described(self, t: Any) -> dict[str, Any] | None:
        """What a record says of a tensor; None of one that has no values now. Raises nothing."""
        try:
            if type(t) is Unreadable:
                raise t.error
            if (t := plain(t)) is None:
                return None
            extra: dict[str, Any] = {}
            if t.is_nested:
                t, extra["nested"] = joined(t)
            why = without_values(t)
            if why:
                extra["note"] = why
            found = {"shape": [int(size) for size in t.shape], "dtype": str(t.dtype)[6:]}
            own = plain_fields(own_statistics(self._chosen.custom, t, why))
            return found | (self._statistics(t, extra) if not why else {}) | extra | own
        except Exception as error:
            kind = t.kind if type(t) is Unreadable else type(t).__name__
            note = f"a {kind} that cannot be read ({said(error)})"
            return {"shape": [0], "dtype": UNKNOWN, "note": note}

    def _statistics(self, t: Tensor, extra: dict[str, Any]) -> dict[str, Any]:
        if not self._chosen.names:
            return {}
        try:
            fields = record_fields(tensor_statistics(t).tolist())
        except Exception as error:
            extra["note"] = f"{error}"[:_LONGEST]
            return {}
        return {name: fields[name] for name in self._chosen.names}


_counters: weakref.WeakKeyDictionary[JsonlSink, Iterator[int]] = weakref.WeakKeyDictionary()


def _next_seq(sink: JsonlSink) -> int:
    """Count the records of a sink, over all the hooks that write into it."""
    return next(_counters.setdefault(sink, itertools.count()))
