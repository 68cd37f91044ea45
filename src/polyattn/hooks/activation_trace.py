"""A face: the trace of torch modules is `polyattn.trace.recorders.torch`, and keeps this name."""

from polyattn.trace.format.sink import JsonlSink
from polyattn.trace.recorders.torch import (
    attach_activation_trace,
    current_step,
    detach_activation_trace,
    trace_step,
)
from polyattn.trace.recorders.torch.any_program import trace_any
from polyattn.trace.recorders.torch.model_trace import ActivationTrace, trace
from polyattn.trace.recorders.torch.stat_hook import ActivationStatHook

__all__ = [
    "ActivationStatHook", "ActivationTrace", "JsonlSink", "attach_activation_trace",
    "current_step", "detach_activation_trace", "trace", "trace_any", "trace_step",
]  # fmt: skip
