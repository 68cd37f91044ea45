"""Which tensors have values that can be recorded, and where these are."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from polyattn.torch.internals import is_fake, is_wrapped_by_transform, transform_level

__all__ = ["joined", "plain", "transforms", "without_values"]

transforms = transform_level
"""The level of torch.func's transforms that run, None outside them."""

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_SHOWN = 8
"""Components of a nested tensor whose shapes are told."""


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


def joined(t: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return the values of a nested tensor as a dense one, and what a record says of their form.

    The components come one after the other, in their own order whatever lies between them: along
    the first dimension where they differ in that alone, as packed sequences do, else flat.

    >>> values, form = joined(torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(1, 4)]))
    >>> values.shape, form
    (torch.Size([3, 4]), {'layout': 'strided', 'count': 2, 'shapes': [[2, 4], [1, 4]]})
    """
    with torch.no_grad():
        parts = [part.detach() for part in t.detach().unbind()]
        shapes = [list(part.shape) for part in parts[:_SHOWN]]
        alike = len({part.shape[1:] for part in parts}) == 1 and all(part.dim() for part in parts)
        found = parts if alike else [part.reshape(-1) for part in parts]
        values = torch.cat(found) if parts else torch.zeros(0, dtype=t.dtype, device=t.device)
    layout = str(t.layout).removeprefix("torch.")
    return values, {"layout": layout, "count": len(parts), "shapes": shapes}


def without_values(t: Tensor) -> str:
    """Return why nothing can be read from a tensor, not even by torch; empty if something can.

    >>> without_values(torch.ones(2, device="meta"))
    'a meta tensor, which has no values'
    """
    if t.is_meta:
        return "a meta tensor, which has no values"
    if type(t) not in _PLAIN or t.layout is not torch.strided or not t.numel():
        return ""
    reach = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    needed = (t.storage_offset() + reach + 1) * t.element_size()
    if t.untyped_storage().nbytes() < needed:  # torch itself would read past the end
        return "a tensor whose memory was freed, as sharding does with weights"
    return ""
