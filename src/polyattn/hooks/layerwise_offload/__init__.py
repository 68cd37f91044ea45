"""Layerwise offload: models that do not fit run all the same, and a plan says how fast beforehand.

Weights live on the host or in files; each unit (a block of the model, as a rule) is fetched ahead
of its use into one of a few slots that never move, and let go afterwards.

:func:`offload` does it; the handle that it returns has the plan, a report, and the way back.
"""

from __future__ import annotations

from polyattn.hooks.layerwise_offload.engine import Engine as LayerwiseOffloadState
from polyattn.hooks.layerwise_offload.handle import LayerwiseOffload
from polyattn.hooks.layerwise_offload.hook import LayerwiseOffloadHook
from polyattn.hooks.layerwise_offload.meta_weights import without_weights
from polyattn.hooks.layerwise_offload.offload_model import enable_layerwise_offload, offload
from polyattn.hooks.layerwise_offload.offload_plan import Facts, OffloadPlan, PlannedUnit
from polyattn.hooks.layerwise_offload.offload_report import OffloadReport
from polyattn.hooks.layerwise_offload.planning import make_plan

LayerwiseOffloadManager = LayerwiseOffload
"""FastVideo's name of the handle, as `LayerwiseOffloadState` is of what holds the slots."""

__all__ = [
    "Facts",
    "LayerwiseOffload",
    "LayerwiseOffloadHook",
    "LayerwiseOffloadManager",
    "LayerwiseOffloadState",
    "OffloadPlan",
    "OffloadReport",
    "PlannedUnit",
    "enable_layerwise_offload",
    "make_plan",
    "offload",
    "without_weights",
]
