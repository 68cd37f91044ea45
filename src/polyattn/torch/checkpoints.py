"""Activation checkpointing: what is computed again runs on the backend of the first time.

A checkpointed region runs twice: in the forward pass, and again during the backward pass, when
other scopes may be in force. Each region keeps, in order, the plans of the attention calls that
its forward pass made; the recomputation takes them from there.

Regions are found on the Python stack, by the code objects of ``torch.utils.checkpoint``, and
only where there can be one: saved-tensor hooks are set (not reentrant), a backward pass is
running (reentrant, recomputing), or a custom autograd function is (reentrant, forward).
"""

from __future__ import annotations

import sys
from typing import Any

from torch import is_inference_mode_enabled

from polyattn.torch.internals import (
    checkpointed_regions,
    current_graph_task,
    is_forward_grad_enabled,
    is_grad_enabled,
    may_be_in_backward,
    saved_tensor_hooks,
)

__all__ = ["ASKED", "Regions", "is_possible", "regions"]

_ATTRIBUTE = "_polyattn_plans"

ASKED = (
    is_grad_enabled,
    is_forward_grad_enabled,
    is_inference_mode_enabled,
    may_be_in_backward,
    saved_tensor_hooks,
)
"""What :func:`is_possible` asks, for the native extension."""


def is_possible() -> bool:
    """Say whether this call may be inside a checkpointed region; cheap, and never wrongly False."""
    if is_grad_enabled():
        return may_be_in_backward() != -1 or saved_tensor_hooks(False) is not None
    return not is_forward_grad_enabled() and not is_inference_mode_enabled()


class Regions:
    """The regions around one call: which plan to take, and where to note what is taken."""

    def __init__(self, recomputed: Any, running: list[Any], run: int) -> None:
        self._recomputed, self._running, self._run = recomputed, running, run

    def replay(self, key: Any) -> tuple[bool, Any]:
        """Return (True, plan) of the forward pass, or (False, None) if this is the forward pass.

        The plan is None where the forward pass noted none: then no request was in force.
        """
        if self._recomputed is None:
            return False, None
        noted: list[Any] = getattr(self._recomputed, _ATTRIBUTE, [])
        cursors = _cursors(self._recomputed)
        place = cursors.get(self._run, 0)
        cursors[self._run] = place + 1
        if place < len(noted) and noted[place][0] == key:
            return True, noted[place][1]
        return True, None

    def note(self, key: Any, plan: Any) -> None:
        """Remember the plan in every region that is running forward around this call."""
        for region in self._running:
            if not hasattr(region, _ATTRIBUTE):
                setattr(region, _ATTRIBUTE, [])
            getattr(region, _ATTRIBUTE).append((key, plan))


def _cursors(region: Any) -> dict[int, int]:
    if not hasattr(region, _ATTRIBUTE + "_at"):
        setattr(region, _ATTRIBUTE + "_at", {})
    found: dict[int, int] = getattr(region, _ATTRIBUTE + "_at")
    return found


def regions() -> Regions | None:
    """Return the checkpointed regions around the caller, innermost first, or None."""
    running: list[Any] = []
    for region, again in checkpointed_regions(sys._getframe(1)):
        if again:
            return Regions(region, running, current_graph_task())
        running.append(region)
    return Regions(None, running, -1) if running else None
