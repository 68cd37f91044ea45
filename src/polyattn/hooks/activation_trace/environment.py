"""Tracing that the environment asks for. Where it asks for none, nothing else is imported."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from polyattn import settings
from polyattn.torch.internals import unwrapped

if TYPE_CHECKING:
    from polyattn.hooks.activation_trace.run import ActivationTrace

__all__ = ["attach_activation_trace", "detach_activation_trace"]

_attached: weakref.WeakKeyDictionary[nn.Module, ActivationTrace] = weakref.WeakKeyDictionary()


def attach_activation_trace(model: nn.Module) -> ActivationTrace | None:
    """Trace a model as ``POLYATTN_TRACE_ACTIVATIONS`` and its companions ask; None if they do not.

    ``POLYATTN_TRACE_LAYERS``, ``_STATS``, ``_STEPS`` and ``_OUTPUT`` are the arguments of
    :func:`polyattn.hooks.trace`. A second model of the process has its class in the file's name.
    Attaching a model again returns the trace it has. It ends with ``detach_activation_trace`` or
    the process. Raises TraceError as :func:`polyattn.hooks.trace` does, and SettingsError for a
    variable that means nothing.

    >>> attach_activation_trace(nn.Linear(2, 2)) is None
    True
    """
    wanted = settings.current()
    if not wanted.trace_activations:
        return None
    from polyattn.hooks.activation_trace.files import file_for
    from polyattn.hooks.activation_trace.run import ActivationTrace

    model = unwrapped(model)
    run = _attached.get(model)
    if run is None or not run.attached:
        run = ActivationTrace(
            model, file_for(wanted.trace_output, model), layers=wanted.trace_layers,
            stats=wanted.trace_stats, steps=wanted.trace_steps,
        )  # fmt: skip
        _attached[model] = run
    return run


def detach_activation_trace(model: nn.Module) -> None:
    """End the trace that ``attach_activation_trace`` gave a model; nothing if there is none.

    >>> detach_activation_trace(nn.Linear(2, 2))
    """
    run = _attached.pop(unwrapped(model), None)
    if run is not None:
        run.close()
