"""Which transforms, modes and levels a call is under: all private names of torch of this backend.

Seen in torch 2.13. They are those that torch's own operators are differentiated by.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _after_autograd_keyset,
    _any_requires_grad,
    _are_functorch_transforms_active,
    _AutoDispatchBelowAutograd,
    _get_tracing_state,
    _is_fwd_grad_enabled,
    _len_torch_dispatch_stack,
    _vmapmode_decrement_nesting,
    _vmapmode_increment_nesting,
)
from torch._C._functorch import is_legacy_batchedtensor
from torch._functorch import autograd_function as _functions
from torch.autograd import forward_ad

__all__ = [
    "PLAIN",
    "WATCHERS",
    "apply_here",
    "batch_apart",
    "batch_together",
    "below",
    "below_function",
    "differentiates",
    "is_batched",
    "is_watched",
    "moves",
    "trains",
]

PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})
WATCHERS = _are_functorch_transforms_active, _len_torch_dispatch_stack, _get_tracing_state


def is_watched() -> bool:
    """Say whether something has to see what is done with plain tensors.

    That is a function transform, a dispatch mode, a trace, or a level of forward mode.
    """
    return (
        _are_functorch_transforms_active()
        or _len_torch_dispatch_stack() > 0
        or _get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def trains(args: Iterable[Any]) -> bool:
    """Say whether reverse mode has to know of a call with these arguments, at this level."""
    return torch.is_grad_enabled() and _any_requires_grad(*args)


_moves_in_graphs = False


def moves(args: Iterable[Any]) -> bool:
    """Say whether forward mode comes with one of the arguments, at this level."""
    global _moves_in_graphs
    # asking a tensor for its tangent costs 5 us. Graphs run without what is_watched looks at, but
    # they were traced, where tangents are seen on fake tensors
    if not _is_fwd_grad_enabled() or not (is_watched() or _moves_in_graphs):
        return False
    # level 0, the only one: the number that unpack_dual takes by default is not set in graphs
    found = any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x, level=0).tangent is not None
        for x in args
    )
    _moves_in_graphs = _moves_in_graphs or (found and _len_torch_dispatch_stack() > 0)
    return found


def differentiates(args: Iterable[Any]) -> bool:
    """Say whether a call that only a kernel can answer is under a transform or forward mode."""
    return _are_functorch_transforms_active() or moves(args)


def apply_here(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply a function at the Autograd key of an operator, to one level of transforms.

    `Function.apply` would hand it to all levels, of which the operator sees one at a time.
    """
    with _functions.enable_single_level_autograd_function():  # type: ignore[attr-defined]
        return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def below(operator: Any, keys: Any, *args: Any) -> Any:
    """Run an operator under its Autograd key: at the next level of transforms, or its kernel."""
    with _AutoDispatchBelowAutograd():
        return operator.redispatch(keys & _after_autograd_keyset, *args)


def below_function(operator: Any, keys: Any, *args: Any) -> Any:
    """Do the same inside a custom function, which switches both modes off.

    Further levels of transforms differentiate for themselves, so for them they are on again.
    """
    if not _are_functorch_transforms_active():
        return below(operator, keys, *args)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return below(operator, keys, *args)


def is_batched(x: Any) -> bool:
    """Say whether `x` is mapped by ``torch.autograd.grad(is_grads_batched=True)``.

    That has a vmap of its own, whose tensors look plain and have no storage.
    """
    return isinstance(x, Tensor) and bool(is_legacy_batchedtensor(x))


def batch_apart(x: Tensor) -> Tensor:
    """Return a mapped tensor with the innermost mapped dim in front, of size 1 if it lacks it."""
    return torch._remove_batch_dim(x, _batch_level(), 1, 0)


def batch_together(x: Tensor) -> Tensor:
    """Map the first dim of `x` at the innermost level."""
    return torch._add_batch_dim(x, 0, _batch_level())


def _batch_level() -> int:
    level = _vmapmode_increment_nesting() - 1
    _vmapmode_decrement_nesting()
    return level
