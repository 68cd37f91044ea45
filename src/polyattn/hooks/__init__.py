"""Hooks on torch modules: see, change and follow what goes through a model.

>>> import torch
>>> from polyattn.hooks import ForwardHook, ModuleHookManager
>>> class Shapes(ForwardHook):
...     def pre_forward(self, module, *args, **kwargs):
...         print("in", tuple(args[0].shape))
...         return args, kwargs
...     def post_forward(self, module, output):
...         print("out", tuple(output.shape))
...         return output
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
>>> with ModuleHookManager.of(model[0]) as manager:
...     handle = manager.attach("shapes", Shapes())
...     _ = model(torch.zeros(2, 4))
in (2, 4)
out (2, 8)
"""

from __future__ import annotations

import importlib
import importlib.util
import typing

if importlib.util.find_spec("torch") is None:
    from polyattn.errors import MissingDependency

    raise MissingDependency(
        "got an import of polyattn.hooks without PyTorch, expected torch >= 2.9: "
        "pip install 'polyattn[torch]'"
    )

from polyattn.errors import HookError
from polyattn.hooks.forward_hook import ForwardHook, recomputing
from polyattn.hooks.manager import HookHandle, ModuleHookManager
from polyattn.trace.recorders.torch import (
    attach_activation_trace,
    detach_activation_trace,
    trace_step,
)

if typing.TYPE_CHECKING:
    from polyattn.hooks.layerwise_offload import (
        LayerwiseOffload,
        LayerwiseOffloadHook,
        LayerwiseOffloadManager,
        LayerwiseOffloadState,
        OffloadPlan,
        enable_layerwise_offload,
        offload,
    )
    from polyattn.trace.assertion import assert_same_activations
    from polyattn.trace.compare import compare
    from polyattn.trace.isolate import isolate
    from polyattn.trace.recorders.torch import ActivationStatHook, JsonlSink, trace, trace_any

__all__ = [
    "ActivationStatHook", "ForwardHook", "HookError", "HookHandle", "JsonlSink",
    "LayerwiseOffload", "LayerwiseOffloadHook", "LayerwiseOffloadManager",
    "LayerwiseOffloadState", "ModuleHookManager", "OffloadPlan",
    "assert_same_activations", "attach_activation_trace", "compare", "detach_activation_trace",
    "enable_layerwise_offload", "isolate", "offload", "recomputing", "trace", "trace_any",
    "trace_step",
]  # fmt: skip


_LAZY = {  # a trace that is off loads nothing, and so does offload
    "ActivationStatHook": "polyattn.trace.recorders.torch",
    "LayerwiseOffload": "polyattn.hooks.layerwise_offload",
    "LayerwiseOffloadHook": "polyattn.hooks.layerwise_offload",
    "LayerwiseOffloadManager": "polyattn.hooks.layerwise_offload",
    "LayerwiseOffloadState": "polyattn.hooks.layerwise_offload",
    "OffloadPlan": "polyattn.hooks.layerwise_offload",
    "enable_layerwise_offload": "polyattn.hooks.layerwise_offload",
    "offload": "polyattn.hooks.layerwise_offload",
    "JsonlSink": "polyattn.trace.recorders.torch",
    "assert_same_activations": "polyattn.trace.assertion",
    "compare": "polyattn.trace.compare",
    "isolate": "polyattn.trace.isolate",
    "trace": "polyattn.trace.recorders.torch",
    "trace_any": "polyattn.trace.recorders.torch",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
