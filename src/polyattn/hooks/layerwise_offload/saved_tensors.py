"""Backward through weights that are no longer there: autograd keeps where they were, not the bytes.

What autograd saves of a weight would keep a slot from ever being filled again. Instead it is given
a note of which unit it was and where, and brings the unit when backward gets there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.engine import Engine
from polyattn.hooks.layerwise_offload.segments import Place
from polyattn.hooks.layerwise_offload.unit import Unit
from polyattn.torch.internals import (
    are_transforms_active,
    current_graph_task,
    is_grad_enabled,
    queue_callback,
    saved_tensor_hooks,
)

__all__ = ["saving_references"]


@dataclass(frozen=True, slots=True)
class _Reference:
    """A weight, or a view of one, as backward needs it."""

    engine: Engine
    unit: Unit
    place: Place
    generation: int


def saving_references(engine: Engine, unit: Unit) -> AbstractContextManager[Any] | None:
    """Return a scope, entered, in which autograd saves references to the unit; None: not needed.

    Where somebody else decides what is saved, as activation checkpointing does, they go on doing
    so: what they keep of a weight keeps its slot.
    """
    if not is_grad_enabled() or saved_tensor_hooks(False) is not None or are_transforms_active():
        return None

    def pack(tensor: Tensor) -> Any:
        shown = unit.shown
        if shown is None or type(tensor) not in (Tensor, torch.nn.Parameter):
            return tensor
        if tensor.layout != torch.strided or tensor.device != shown.device or not tensor.numel():
            return tensor
        if tensor.untyped_storage().data_ptr() != shown.untyped_storage().data_ptr():
            return tensor
        place = Place.of(tensor, int(tensor.storage_offset()) * tensor.element_size())
        return _Reference(engine, unit, place, unit.generation(place.offset))

    scope = saved_tensors_hooks(pack, _unpack)
    scope.__enter__()
    return scope


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _Reference):
        return saved  # type: ignore[no-any-return]
    if saved.unit.generation(saved.place.offset) != saved.generation:
        raise OffloadError(
            f"got a backward pass through {saved.unit.name}, whose weights were changed after the "
            "forward pass, expected them as they were: change weights after backward"
        )
    saved.engine.begin_backward(current_graph_task(), queue_callback)
    tensor = saved.engine.borrow(saved.unit, saved.place)
    saved.engine.fetch_ahead()
    return tensor
