"""Which transforms, modes and levels a call is under."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from polyattn.torch.internals import (
    any_requires_grad,
    are_transforms_active,
    dispatch_modes,
    dual_levels,
    is_legacy_batched,
    is_watched,
    mark_constant,
    may_be_traced_before_autograd,
    may_carry_tangents,
    tracing_state,
)

__all__ = ["PLAIN", "WATCHERS", "differentiates", "is_batched", "is_transformed", "moves", "trains"]

PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})
WATCHERS = are_transforms_active, dispatch_modes, may_be_traced_before_autograd, tracing_state


def trains(args: Iterable[Any]) -> bool:
    """Say whether reverse mode has to know of a call with these arguments, at this level."""
    return torch.is_grad_enabled() and any_requires_grad(*args)


_moves_in_graphs = False


def moves(args: Iterable[Any]) -> bool:
    """Say whether forward mode comes with one of the arguments, at this level."""
    global _moves_in_graphs
    # asking a tensor for its tangent costs 5 us. Graphs run without what is_watched looks at, but
    # they were traced, where tangents are seen on fake tensors
    if not may_carry_tangents() or not (is_watched() or _moves_in_graphs):
        return False
    # level 0, the only one: the number that unpack_dual takes by default is not set in graphs
    found = any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x, level=0).tangent is not None
        for x in args
    )
    _moves_in_graphs = _moves_in_graphs or (found and dispatch_modes() > 0)
    return found


def differentiates(args: Iterable[Any]) -> bool:
    """Say whether a call that only a kernel can answer is under a transform or forward mode."""
    return are_transforms_active() or moves(args)


def is_transformed() -> bool:
    """Say, while a compiler traces, whether function transforms or forward mode are around."""
    return are_transforms_active() or dual_levels._current_level >= 0


mark_constant(is_transformed)


def is_batched(x: Any) -> bool:
    """Say whether `x` is mapped by ``torch.autograd.grad(is_grads_batched=True)``.

    That has a vmap of its own, whose tensors look plain and have no storage.
    """
    return isinstance(x, Tensor) and bool(is_legacy_batched(x))
