"""The activation trace: what goes into and comes out of each module of a model, in a file.

Importing this loads no part that records: ``attach_activation_trace`` and ``trace_step`` cost
nothing where no trace is on. See ``docs/trace.md``.
"""

from __future__ import annotations

import importlib
import typing

from polyattn.hooks.activation_trace.environment import (
    attach_activation_trace,
    detach_activation_trace,
)
from polyattn.hooks.activation_trace.step import current_step, trace_step

if typing.TYPE_CHECKING:
    from polyattn.hooks.activation_trace.any_program import trace_any
    from polyattn.hooks.activation_trace.run import ActivationTrace, trace
    from polyattn.hooks.activation_trace.stat_hook import ActivationStatHook
    from polyattn.trace import JsonlSink

__all__ = [
    "ActivationStatHook", "ActivationTrace", "JsonlSink", "attach_activation_trace",
    "current_step", "detach_activation_trace", "trace", "trace_any", "trace_step",
]  # fmt: skip

_LAZY = {
    "ActivationStatHook": "polyattn.hooks.activation_trace.stat_hook",
    "ActivationTrace": "polyattn.hooks.activation_trace.run",
    "JsonlSink": "polyattn.trace",
    "trace": "polyattn.hooks.activation_trace.run",
    "trace_any": "polyattn.hooks.activation_trace.any_program",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
