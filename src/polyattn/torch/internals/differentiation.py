"""How an operator of polyattn's own is differentiated and mapped as torch's own operators are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from polyattn.torch.internals.private_names import MISSING, deferred, noted, private
from polyattn.torch.internals.state import are_transforms_active

__all__ = [
    "OneLevelFunction",
    "any_requires_grad",
    "apply_here",
    "below",
    "below_function",
    "is_legacy_batched",
    "legacy_batch_apart",
    "legacy_batch_together",
    "outside_transforms",
    "may_carry_tangents",
]

_without_transforms = deferred(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "polyattn.hooks.offload refuses calls inside transforms of torch.func",
)


def outside_transforms() -> AbstractContextManager[object]:
    """Return a scope in which operators are no part of the transforms of torch.func that run."""
    return _without_transforms()() if are_transforms_active() else nullcontext()


any_requires_grad: Callable[..., bool] = private(
    "torch._C._any_requires_grad",
    "the arguments, and the entries of lists among them, are asked one by one",
    lambda *args: any(map(_requires_grad, args)),
)
"""Whether one of the arguments, or of a list among them, requires a gradient."""


def _requires_grad(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(map(_requires_grad, x))
    return isinstance(x, Tensor) and x.requires_grad


may_carry_tangents: Callable[[], bool] = private(
    "torch._C._is_fwd_grad_enabled",
    "every call without gradients is taken for one that may be inside a checkpointed region, and "
    "every tensor is asked for its tangent",
    lambda: True,
)
"""Whether forward-mode gradients are on; True where that cannot be told."""

_below_autograd: Callable[[], AbstractContextManager[Any]] = private(
    "torch._C._AutoDispatchBelowAutograd",
    "a trace inside compiled code refuses: what it records would become part of the gradient; "
    "native_cpu's operators run with autograd in sight, which then notes what it need not",
    nullcontext,
)
_AFTER = noted(
    "torch._C._after_autograd_keyset",
    "the operators of native_cpu refuse: compiled code, transforms, subclasses of tensors",
)
_after: Any = _AFTER.find()


def below(operator: Any, keys: Any, *args: Any) -> Any:
    """Run an operator under its Autograd key: at the next level of transforms, or its kernel."""
    if _after is MISSING:
        _AFTER.refuse()
    with _below_autograd():
        return operator.redispatch(keys & _after, *args)


_set_forward_grad: Callable[[bool], AbstractContextManager[Any]] = private(
    "torch.autograd.forward_ad._set_fwd_grad_enabled",
    "native_cpu refuses to be differentiated under a transform of torch.func",
)


def below_function(operator: Any, keys: Any, *args: Any) -> Any:
    """Do the same inside a custom function, which switches both modes off.

    Further levels of transforms differentiate for themselves, so for them they are on again.
    """
    if not are_transforms_active():
        return below(operator, keys, *args)
    with torch.enable_grad(), _set_forward_grad(True):
        return below(operator, keys, *args)


_one_level = deferred(
    "torch._functorch.autograd_function.enable_single_level_autograd_function",
    "native_cpu refuses to be differentiated by its operators, which is how compiled code and "
    "transforms do it",
)


OneLevelFunction: Any = private(
    "torch.autograd.function._SingleLevelFunction",
    "native_cpu's operators are not differentiated under a transform: torch refuses",
    torch.autograd.Function,
)
"""The base of functions that `apply_here` takes."""


def apply_here(function: Any, *args: Any) -> Any:
    """Apply a function at the Autograd key of an operator, to one level of transforms.

    ``torch.autograd.Function`` would be handed to all, of which the operator sees one at a time.
    """
    with _one_level()():
        return function.apply(*args)


# --- the vmap inside of torch.autograd.grad(is_grads_batched=True) ---

is_legacy_batched: Callable[[Tensor], bool] = private(
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch.autograd.grad(is_grads_batched=True) through native_cpu ends in an error of torch's",
    lambda x: False,
)
"""Whether a tensor is one that torch.autograd.grad maps; it looks plain and has no storage."""

_BATCHED = "torch.autograd.grad(is_grads_batched=True) through native_cpu refuses"
_deeper: Callable[[], int] = private("torch._C._vmapmode_increment_nesting", _BATCHED)
_shallower: Callable[[], int] = private("torch._C._vmapmode_decrement_nesting", _BATCHED)
_remove_dim: Callable[..., Tensor] = private("torch._remove_batch_dim", _BATCHED)
_add_dim: Callable[..., Tensor] = private("torch._add_batch_dim", _BATCHED)


def legacy_batch_apart(x: Tensor) -> Tensor:
    """Return a mapped tensor with the innermost mapped dim in front, of size 1 if it lacks it."""
    return _remove_dim(x, _legacy_level(), 1, 0)


def legacy_batch_together(x: Tensor) -> Tensor:
    """Map the first dim of `x` at the innermost level."""
    return _add_dim(x, 0, _legacy_level())


def _legacy_level() -> int:
    level = _deeper() - 1
    _shallower()
    return level
