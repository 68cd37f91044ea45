"""The activation trace: what goes into and comes out of each module of a model, in a file.

Importing this loads no part that records: ``attach_activation_trace`` and ``trace_step`` cost
nothing where no trace is on. See ``docs/trace.md``.
"""

from __future__ import annotations

import importlib
import typing

from polyattn.trace.recorders.torch.environment import (
    attach_activation_trace,
    detach_activation_trace,
)
from polyattn.trace.recorders.torch.step import current_step, trace_step

if typing.TYPE_CHECKING:
    from polyattn.trace.format.sink import JsonlSink
    from polyattn.trace.recorders.torch.any_program import trace_any
    from polyattn.trace.recorders.torch.model_trace import ActivationTrace, trace
    from polyattn.trace.recorders.torch.stat_hook import ActivationStatHook

__all__ = [
    "ActivationStatHook", "ActivationTrace", "JsonlSink", "attach_activation_trace",
    "current_step", "detach_activation_trace", "trace", "trace_any", "trace_step",
]  # fmt: skip


_LAZY = {
    "ActivationStatHook": "polyattn.trace.recorders.torch.stat_hook",
    "ActivationTrace": "polyattn.trace.recorders.torch.model_trace",
    "JsonlSink": "polyattn.trace.format.sink",
    "trace": "polyattn.trace.recorders.torch.model_trace",
    "trace_any": "polyattn.trace.recorders.torch.any_program",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
