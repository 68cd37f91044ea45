"""What a tensor's values are in memory: shared until written to, or nowhere at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from polyattn.torch.internals.private_names import noted, private

__all__ = [
    "address_of",
    "is_lazy_copy",
    "is_zero_tensor",
    "negated_view",
    "storage_holders",
    "storage_identity",
    "without_overrides",
    "wrapper_tensor",
]

_storage_starts: Callable[[Tensor], int] | None = private(
    "torch._C._data_address",
    "Tensor.const_data_ptr, public since 2.13, is called, or Tensor.data_ptr, by which tensors "
    "that are to be copied on write are copied",
    None,
)


def read_address(x: Tensor) -> int:
    """Return the address to read at, in a torch without Tensor.const_data_ptr."""
    if _storage_starts is None:
        return x.data_ptr()
    # of its storage, whatever torch's own docstring says
    return _storage_starts(x) + int(x.storage_offset()) * x.element_size()


address_of: Callable[[Tensor], int] = getattr(Tensor, "const_data_ptr", read_address)
"""The address to read at; tensors that are to be copied on write stay uncopied."""

is_lazy_copy: Callable[[Tensor], bool] = private(
    "torch._C._is_cow_tensor",
    "every call goes the slower way of native_cpu, that never copies",
    lambda x: True,
)
"""Whether a tensor is to be copied on write."""

is_zero_tensor: Callable[[Tensor], bool] = private(
    "torch.Tensor._is_zerotensor",
    "a tensor with entries at address 0 is taken for one",
    lambda x: x.numel() > 0 and address_of(x) == 0,
)
"""Whether a tensor stands for zeros that are nowhere in memory."""

negated_view: Callable[[Tensor], Tensor] = private(
    "torch._neg_view",
    "offloaded parameters that are negated views, of imaginary parts of conjugates, are refused",
)
"""The same memory, whose entries count with the other sign."""

_STORAGE = noted(
    "torch.UntypedStorage._cdata",
    "polyattn.hooks.layerwise_offload refuses",
    sample=lambda: Tensor().untyped_storage(),
)
_holders: Callable[[int], int] = private(
    "torch._C._storage_Use_Count", "polyattn.hooks.layerwise_offload refuses"
)


def storage_identity(tensor: Tensor) -> int:
    """Return what tells a tensor's storage from all others that live, also on no device."""
    found = getattr(tensor.untyped_storage(), _STORAGE.name, None)
    if found is None:
        _STORAGE.refuse()
    return int(found)


def storage_holders(tensor: Tensor) -> int:
    """Return how many hold a tensor's storage: tensors, views of it, what autograd saved."""
    return _holders(storage_identity(tensor))


wrapper_tensor: Callable[..., Any] = private(
    "torch.Tensor._make_wrapper_subclass", "`polyattn bench offload` leaves quantised weights out"
)
"""Make a tensor of a subclass that has no memory of its own."""

without_overrides: Callable[[], AbstractContextManager[object]] = private(
    "torch._C.DisableTorchFunctionSubclass",
    "the memory of parameters of other libraries' classes is exchanged by way of their overrides",
    contextlib.nullcontext,
)
"""A scope in which ``__torch_function__`` of tensor subclasses is not called."""
