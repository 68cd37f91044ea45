"""Sizes that a compiler keeps as symbols: what is known of them without a guard.

Compilers trace `hint_of` and `is_known`, and answer what those ask of torch. Nothing here imports
what torch has for symbols before a program is traced, when it is there already.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polyattn.torch.internals.compiling import mark_constant
from polyattn.torch.internals.private_names import deferred

__all__ = ["are_sizes_marked", "hint_of", "holds", "is_known"]


def _has_hints() -> bool:
    from torch.fx.experimental import symbolic_shapes

    return hasattr(symbolic_shapes, "optimization_hint")


mark_constant(_has_hints)


def hint_of(size: Any) -> int:
    """Return the number that an open size has in this call, guarding nothing; 0 where none is told.

    A torch without `optimization_hint` tells none: there it is the next power of two, guarded, and
    of sizes that must not be guarded none.
    """
    if not _has_hints():
        from torch.fx.experimental.symbolic_shapes import has_static_value

        if has_static_value(size):
            return size  # type: ignore[no-any-return]
        if are_sizes_marked():
            return 0
        bound = 1
        while bound < size:
            bound *= 2
        return bound if size else 0
    from torch.fx.experimental.symbolic_shapes import optimization_hint

    return optimization_hint(size, 0)


def is_known(comparison: Any) -> bool:
    """Say whether a comparison of sizes holds for all that they may be; it guards nothing."""
    if isinstance(comparison, Tensor):  # torch.jit.trace has tensors for sizes
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(comparison)


def holds(comparison: Any) -> bool:
    """Say whether a comparison of sizes holds, guarding it; no of sizes that have no number yet."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(comparison)


_tracing = deferred(
    "torch._guards.TracingContext",
    "sizes that were marked dynamic are guarded as others, which the compiler may refuse",
    None,
)


def are_sizes_marked() -> bool:
    """Say whether an input of what is traced has sizes that must not be guarded.

    Those of ``mark_dynamic`` and ``mark_unbacked``; guards of what is open by itself are allowed.
    """
    tracing = _tracing()
    context = None if tracing is None else tracing.try_get()
    for policy in getattr(context, "tensor_to_context", {}).values():
        for constraint in getattr(policy, "constraint_sizes", None) or ():
            if constraint is not None and not getattr(constraint, "warn_only", False):
                return True
        for kind in getattr(policy, "dynamic_sizes", None) or ():
            if getattr(kind, "name", "").endswith("UNBACKED"):
                return True
    return False


mark_constant(are_sizes_marked)
