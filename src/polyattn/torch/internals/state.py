"""What torch is doing around a call: gradients, function transforms, modes, backward passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad

from polyattn.torch.internals.private_names import MISSING, noted, private

__all__ = [
    "VERSION_COUNTER",
    "are_higher",
    "are_overrides_on",
    "are_transforms_active",
    "below_autograd",
    "current_graph_task",
    "dispatch_modes",
    "dual_level",
    "dual_levels",
    "function_modes",
    "is_deterministic",
    "is_fake",
    "is_forward_grad_enabled",
    "is_grad_enabled",
    "is_mapped",
    "is_watched",
    "is_wrapped_by_transform",
    "may_be_in_backward",
    "may_be_traced_before_autograd",
    "queue_callback",
    "saved_tensor_hooks",
    "tracing_state",
    "transform_level",
    "transforms",
    "version_of",
]

current_graph_task: Callable[[], int] = private(
    "torch._C._current_graph_task_id",
    "what runs inside a backward pass cannot be told; recomputation and traces refuse",
)
"""The number of the backward pass that runs in this thread, -1 outside of one."""

may_be_in_backward: Callable[[], int] = private(
    "torch._C._current_graph_task_id",
    "what runs inside a backward pass cannot be told; recomputation and traces refuse",
    lambda: 0,
)
"""The same, but 0 where that cannot be told."""

is_deterministic: Callable[[], bool] = private(
    "torch._C._get_deterministic_algorithms",
    "torch.are_deterministic_algorithms_enabled(), a Python function, is called instead",
    torch.are_deterministic_algorithms_enabled,
)

is_forward_grad_enabled: Callable[[], bool] = private(
    "torch._C._is_fwd_grad_enabled",
    "every call without gradients is taken for one that may be inside a checkpointed region, and "
    "every tensor is asked for its tangent",
    lambda: False,
)
"""Whether forward-mode gradients are on: off inside custom autograd functions."""

saved_tensor_hooks: Callable[[bool], Any] = private(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "every call with gradients is taken for one that may be inside a checkpointed region",
    lambda ignore: (),
)
"""The innermost saved-tensor hooks of this thread, None without any."""

are_transforms_active: Callable[[], bool] = private(
    "torch._C._are_functorch_transforms_active",
    "every call is taken for one inside a transform of torch.func, the slower and general way",
    lambda: True,
)

transform_level: Callable[[], int | None] = private(
    "torch._C._functorch.maybe_current_level",
    "the level counts as 0 where a transform runs and as none elsewhere",
    lambda: 0 if are_transforms_active() else None,
)
"""The level of torch.func's transforms that run, None outside them."""

_transform_stack: Callable[[], Any] = private(
    "torch._C._functorch.get_interpreter_stack",
    "each function transform counts as one of forward mode and of derivatives beyond the first",
    lambda: (SimpleNamespace(key=lambda: SimpleNamespace(name="Jvp")),),
)


def transforms() -> tuple[str, ...]:
    """Return the transforms of torch.func around a call, outermost first: ("Vmap", "Grad")."""
    if not are_transforms_active():
        return ()
    return tuple(one.key().name for one in _transform_stack() or ())


def are_higher(names: tuple[str, ...]) -> bool:
    """Say whether transforms ask for forward mode, or for derivatives of derivatives.

    >>> are_higher(("Vmap", "Grad")), are_higher(("Grad", "Grad")), are_higher(("Jvp",))
    (False, True, True)
    """
    return "Jvp" in names or names.count("Grad") > 1


is_wrapped_by_transform: Callable[[Tensor], bool] = private(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "inside a transform every tensor counts as one of its own, whose values cannot be read",
    lambda tensor: True,
)

_is_batched: Callable[[Tensor], bool] = private(
    "torch._C._functorch.is_batchedtensor",
    "values of what a transform wraps are not read, so that wrong lengths are not refused there",
    lambda tensor: True,
)
_below: Callable[[Tensor], Tensor] = private(
    "torch._C._functorch.get_unwrapped", "as without is_batchedtensor", lambda tensor: tensor
)


def is_mapped(tensor: Tensor) -> bool:
    """Say whether a vmap that runs makes many of a tensor, whose values are no single ones."""
    while is_wrapped_by_transform(tensor):
        if _is_batched(tensor) or (inside := _below(tensor)) is tensor:
            return True
        tensor = inside
    return False


dispatch_modes: Callable[[], int] = private(
    "torch._C._len_torch_dispatch_stack",
    "every call is taken for one under a dispatch mode, the slower and general way",
    lambda: 1,
)
"""How many dispatch modes (fake tensors, tracing) are in force."""

function_modes: Callable[[], int] = private(
    "torch._C._len_torch_function_stack",
    "every call is taken for one under a function mode: the machine is never calibrated",
    lambda: 1,
)
"""How many function modes (a default device, a logger of calls) are in force."""

are_overrides_on: Callable[[], bool] = private(
    "torch._C._is_torch_function_enabled",
    "tensor subclasses are taken to override everywhere",
    lambda: True,
)
"""Whether ``__torch_function__`` of tensor subclasses is called here."""

tracing_state: Callable[[], Any] = private(
    "torch._C._get_tracing_state",
    "torch.jit.is_tracing(), a Python function, is called instead",
    lambda: torch.jit.is_tracing() or None,  # type: ignore[attr-defined]
)
"""What torch.jit.trace is making, None while it is not."""

below_autograd: Callable[[], AbstractContextManager[Any]] = private(
    "torch._C._AutoDispatchBelowAutograd",
    "a trace inside compiled code refuses: what it records would become part of the gradient; "
    "native_cpu's operators run with autograd in sight, which then notes what it need not",
)
"""A scope in which operators run below autograd."""

queue_callback: Callable[[Callable[[], None]], None] = private(
    "torch.autograd.Variable._execution_engine.queue_callback",
    "the end of a backward pass is not told; traces with gradients refuse",
)
"""Have a function called at the end of the backward pass that runs."""

noted(
    "torch.autograd.forward_ad._current_level",
    "every call is taken for one with forward-mode gradients, the slower and general way",
)
dual_levels: Any = (
    forward_ad if hasattr(forward_ad, "_current_level") else SimpleNamespace(_current_level=0)
)
"""What has the level of forward mode: `dual_levels._current_level`, -1 outside of it.

The quickest kernels read it in place, for a call costs four times as much.
"""


def dual_level() -> int:
    """Return the level of forward-mode differentiation, -1 outside of it."""
    return dual_levels._current_level  # type: ignore[no-any-return]


_PRE_DISPATCH = noted(
    "torch._C.DispatchKey.PreDispatch", "make_fx is asked itself whether it records"
).find()
_includes: Any = private(
    "torch._C._dispatch_tls_is_dispatch_key_included",
    "make_fx is asked itself whether it records",
    None,
)
may_be_traced_before_autograd: Callable[[], bool] = (
    (lambda: True)
    if _PRE_DISPATCH is MISSING or _includes is None
    else functools.partial(_includes, _PRE_DISPATCH)
)
"""Whether make_fx may record operators before autograd sees them, which counts as no mode."""


def is_watched() -> bool:
    """Say whether something has to see what is done with plain tensors.

    That is a function transform, a dispatch mode, a trace, or a level of forward mode.
    """
    return (
        are_transforms_active()
        or dispatch_modes() > 0
        or tracing_state() is not None
        or dual_levels._current_level >= 0
        or may_be_traced_before_autograd()
    )


_VERSION = noted(
    "torch.Tensor._version",
    "it is not told whether a tensor was changed in place; traces and the cache of blocks refuse",
)
version_of: Callable[[Tensor], int] = (
    _VERSION.refuse if _VERSION.find() is MISSING else attrgetter("_version")
)
"""How often a tensor was changed in place; inference tensors have no such number."""
VERSION_COUNTER = _VERSION.name
"""By which native code asks for it."""

noted("torch._subclasses.fake_tensor.FakeTensor", "no tensor is taken for a fake one")


def is_fake(tensor: Any) -> bool:
    """Say whether a tensor has no values because a compiler only looks at its shape.

    Its class is known by name: importing it takes a while, and it may be in use nowhere.
    """
    return any(
        kind.__name__ == "FakeTensor" and kind.__module__ == "torch._subclasses.fake_tensor"
        for kind in type(tensor).__mro__
    )
