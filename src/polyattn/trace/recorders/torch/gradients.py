"""Gradients of what goes into and comes out of a module, by hooks on the tensors themselves.

What is recorded is the gradient of the loss by the tensor, over *all* its uses: for an output it is
what full backward hooks call ``grad_output``; for an input that other modules use too, as in a
residual connection, it holds their part as well. In exchange the graph is as without a trace, and
modules that change their arguments in place or return views work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from polyattn.torch.internals import queue_callback, version_of

if TYPE_CHECKING:
    from polyattn.trace.recorders.torch.recorder import Call, Recorder

__all__ = ["Gradients"]


class Gradients:
    """Follows tensors until their gradient comes, once each."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._awaited = WeakIdKeyDictionary()

    def follow(self, call: Call, phase: str, found: list[tuple[str, Tensor]]) -> None:
        """Record the gradients of these tensors when they come."""
        if call.compiled:
            self._recorder.say("gradients inside compiled code are not recorded; run it eagerly")
            return
        if not torch.is_grad_enabled():
            return
        for path, t in found:
            try:
                if getattr(t, "requires_grad", False):
                    self._await(t).places.append((call, phase, path))
            except Exception as error:  # a tensor that takes no hook, or lets nobody ask
                self._recorder.missed(call.hook, error)

    def _await(self, t: Tensor) -> _Awaited:
        """What waits for the gradient of a tensor as it is now: one hook, however many places.

        What changes it in place makes another tensor of it for autograd.
        """
        found = self._awaited.get(t)
        if found is None or found.came or found.version != version_of(t):
            found = self._awaited[t] = _Awaited(self._recorder, version_of(t), t.is_leaf)
            found.handle = t.register_hook(found)
        return found


class _Awaited:
    """The places of one tensor whose gradient is awaited."""

    def __init__(self, recorder: Recorder, version: int, leaf: bool) -> None:
        self.version, self.came, self._leaf = version, False, leaf
        self.places: list[tuple[Call, str, str]] = []
        self.handle: Any = None
        self._recorder = recorder

    def __call__(self, gradient: Tensor) -> None:
        self.came = True
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
        if self._recorder.sink.closed or not self.places:
            return
        try:
            self._record(gradient)
        except Exception as error:  # the backward pass goes on
            self._recorder.missed(self.places[0][0].hook, error)

    def _record(self, gradient: Tensor) -> None:
        recorder = self._recorder
        lane = recorder.lane()
        if not lane.events and not lane.stack:
            # At the end of this backward; the lane is that of the device's thread.
            queue_callback(lambda: recorder.end_of_forward(lane))
        # The backward pass comes through the places in the reverse of the forward's order: out of
        # a module that the tensor went into, then into the one that made it.
        for call, phase, path in self._latest():
            recorder.record(lane, call, phase, [(path, gradient)])

    def _latest(self) -> list[tuple[Call, str, str]]:
        """The places, last first; of a leaf that several forwards used those of the last one, as
        the gradients of the others never came.
        """
        if not self._leaf:
            return self.places[::-1]
        found: dict[tuple[int, str, str], tuple[Call, str, str]] = {}
        for place in reversed(self.places):
            call, phase, path = place
            found.setdefault((id(call.hook), phase, path), place)
        return list(found.values())
