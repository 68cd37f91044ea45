"""Tracing that the environment asks for. Where it asks for none, nothing else is imported."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from polyattn import settings
from polyattn.errors import TraceError
from polyattn.torch.internals import unwrapped

if TYPE_CHECKING:
    from polyattn.trace.recorders.torch.model_trace import ActivationTrace

__all__ = ["attach_activation_trace", "detach_activation_trace"]

_attached: weakref.WeakKeyDictionary[nn.Module, ActivationTrace] = weakref.WeakKeyDictionary()


def attach_activation_trace(model: nn.Module) -> ActivationTrace | None:
    """Trace a model as ``POLYATTN_TRACE_ACTIVATIONS`` and its companions ask; None if they do not.

    ``POLYATTN_TRACE_LAYERS``, ``_STATS``, ``_STEPS``, ``_INPUTS``, ``_OUTPUT`` and ``_OVERWRITE``
    are the arguments of :func:`polyattn.hooks.trace`. A second model of the process has its class
    in the file's name. Attaching a model again returns the trace it has. It ends with
    ``detach_activation_trace`` or the process. Raises TraceError as :func:`polyattn.hooks.trace`
    does, and SettingsError for a variable that means nothing.

    >>> attach_activation_trace(nn.Linear(2, 2)) is None
    True
    """
    wanted = settings.current()
    if not wanted.trace_activations:
        return None
    from polyattn.trace.recorders.torch.files import file_for, give_back
    from polyattn.trace.recorders.torch.model_trace import ActivationTrace

    model = unwrapped(model)
    run = _attached.get(model)
    if run is None or not run.attached:
        path = file_for(wanted.trace_output, model)
        try:
            run = ActivationTrace(
                model,
                path,
                layers=wanted.trace_layers,
                stats=wanted.trace_stats,
                steps=wanted.trace_steps,
                inputs=wanted.trace_inputs,
                overwrite=wanted.trace_overwrite,
            )
        except BaseException:
            give_back(path)
            raise
        _attached[model] = run
    return run


def detach_activation_trace(trace: ActivationTrace | nn.Module | None) -> None:
    """End a trace: what ``attach_activation_trace`` returned, or of the model it was given.

    None, as it returns where no trace is on, is nothing to do, and so is a trace that has ended, or
    a model that has none. Raises TraceError if records were lost, as on a full disk.

    >>> run = attach_activation_trace(nn.Linear(2, 2))
    >>> detach_activation_trace(run)
    """
    if trace is None:
        return
    if isinstance(trace, nn.Module):
        run = _attached.pop(unwrapped(trace), None)
        if run is not None:
            run.close()
        return
    model = getattr(trace, "model", None)
    if not isinstance(model, nn.Module):
        raise TraceError(
            f"got a {type(trace).__name__} to detach, expected what attach_activation_trace "
            "returned, a trace or None, or the model that it was given."
        )
    if _attached.get(model) is trace:
        del _attached[model]
    trace.close()
