"""Gradients of what goes into and comes out of a module, by hooks on the tensors themselves.

What is recorded is the gradient of the loss by the tensor, over *all* its uses: for an output it is
what full backward hooks call ``grad_output``; for an input that other modules use too, as in a
residual connection, it holds their part as well. In exchange the graph is as without a trace, and
modules that change their arguments in place or return views work.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from polyattn.hooks.activation_trace.recorder import Call, Recorder

__all__ = ["Gradients"]


class Gradients:
    """Follows tensors until their gradient comes, once each."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._of_leaves: dict[tuple[int, int, str], Any] = {}

    def follow(self, call: Call, phase: str, found: list[tuple[str, Tensor]]) -> None:
        """Record the gradients of these tensors when they come."""
        if call.compiled:
            self._recorder.say("gradients inside compiled code are not recorded; run it eagerly")
            return
        if not torch.is_grad_enabled():
            return
        for path, t in found:
            if not t.requires_grad:
                continue
            # A leaf outlives the forward, and the backward of an earlier one may never have come.
            key = (id(t), id(call.hook), path) if t.is_leaf else None
            if key is not None and (earlier := self._of_leaves.pop(key, None)) is not None:
                earlier.remove()
            handles: list[Any] = []
            handles.append(t.register_hook(partial(self._came, handles, key, call, phase, path)))
            if key is not None:
                self._of_leaves[key] = handles[0]

    def _came(
        self,
        handles: list[Any],
        key: tuple[int, int, str] | None,
        call: Call,
        phase: str,
        path: str,
        gradient: Tensor,
    ) -> None:
        handles.pop().remove()
        if key is not None:
            self._of_leaves.pop(key, None)
        recorder = self._recorder
        if recorder.sink.closed:
            return
        lane = recorder.lane()
        if not lane.events and not lane.stack:
            # At the end of this backward; the lane is that of the device's thread.
            torch.autograd.Variable._execution_engine.queue_callback(
                partial(recorder.end_of_forward, lane)
            )
        recorder.record(lane, call, phase, [(path, gradient)])
