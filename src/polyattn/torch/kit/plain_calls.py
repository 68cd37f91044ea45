"""Whether a call is one of eager code with plain tensors, of which nobody else wants to know."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.torch.internals import (
    are_transforms_active,
    dispatch_modes,
    dual_levels,
    is_lazy_copy,
    may_be_traced_before_autograd,
    tracing_state,
)

__all__ = ["ASKERS", "is_plain_call"]

ASKERS = are_transforms_active, dispatch_modes, may_be_traced_before_autograd
"""What says whether somebody else wants to know of a call; tracers and forward mode beside."""
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def is_plain_call(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Say whether the tensors' own memory may be read, and a node of the graph be made at once.

    Not under function transforms, dispatch modes, tracers or forward mode, and not of subclasses or
    copies that are made when they are written.

    >>> import torch
    >>> x = torch.ones(1, 2, 3, 4)
    >>> asked = torch.func.vmap(lambda y: y * is_plain_call(y, y, y))
    >>> is_plain_call(x, x, x), bool(asked(x).any())
    (True, False)
    """
    return not (
        not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN)
        or (are_transforms_active() or dispatch_modes() or may_be_traced_before_autograd())
        or (tracing_state() is not None or dual_levels._current_level >= 0)
        or (is_lazy_copy(q) or is_lazy_copy(k) or is_lazy_copy(v))
    )
