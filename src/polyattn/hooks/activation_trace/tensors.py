"""Which tensors have values that can be recorded, and where these are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["plain", "transforms"]

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)

transforms: Callable[[], int | None] = torch._C._functorch.maybe_current_level
"""The level of torch.func's transforms that run, None outside them."""


def plain(t: Any) -> Any:
    """Return the tensor that holds the values, or None if there are none now.

    A distributed tensor gives this rank's part. Fake tensors and those that torch.func transforms
    have no values of their own.
    """
    if type(t) in _PLAIN:
        inside = transforms() is not None and torch._C._functorch.is_functorch_wrapped_tensor(t)
        return None if inside else t
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(t, distributed.DTensor):
        return plain(t.to_local())
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(t, fake.FakeTensor):
        return None
    return t
