"""Which tensors have values that can be recorded, and where these are."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from polyattn.torch.internals import is_fake, is_wrapped_by_transform, transform_level

__all__ = ["plain"]

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def plain(t: Any) -> Any:
    """Return the tensor that holds the values, or None if there are none now.

    A distributed tensor gives this rank's part. Fake tensors and those that torch.func transforms
    have no values of their own.
    """
    if type(t) in _PLAIN:
        inside = transform_level() is not None and is_wrapped_by_transform(t)
        return None if inside else t
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(t, distributed.DTensor):
        return plain(t.to_local())
    return None if is_fake(t) else t
