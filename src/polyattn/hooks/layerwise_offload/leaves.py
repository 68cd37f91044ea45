"""The plain tensors that make up a module's weights: what offload moves is these, nothing else.

A quantised parameter (a tensor subclass with ``__tensor_flatten__``, as of torchao, NF4, DTensor)
holds plain tensors inside; those are moved and the parameter stays the object that it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from polyattn.errors import OffloadError
from polyattn.torch.internals import (
    children_of,
    own_buffers,
    own_parameters,
    storage_identity,
    version_of,
    without_overrides,
)

__all__ = ["Leaf", "inner_tensors", "leaves_of", "plain", "put_data", "within_storage"]


@dataclass(slots=True, eq=False)
class Leaf:
    """One plain tensor: a parameter, a buffer, or a tensor inside of a quantised parameter."""

    name: str
    tensor: Tensor  # the object whose memory is exchanged; it stays the same object
    outer: Tensor  # the parameter or buffer that it belongs to
    is_buffer: bool
    aliases: list[str] = field(default_factory=list)  # its other names, if it is tied

    @property
    def nbytes(self) -> int:
        """How many bytes its values are."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def trained(self) -> bool:
        """Whether the parameter asks for a gradient."""
        return self.outer.requires_grad

    @property
    def version(self) -> int:
        """How often it was changed in place; -1 for inference tensors, which do not count.

        What was made as one counts nothing either once it has the memory of an ordinary tensor.
        """
        try:
            return version_of(self.tensor)
        except RuntimeError:
            return -1

    @property
    def address(self) -> int:
        """Where it lies now; 0 for a meta tensor."""
        with plain():
            return 0 if self.tensor.is_meta else self.tensor.data_ptr()


def plain() -> AbstractContextManager[object]:
    """A scope in which subclasses of Parameter are taken as the tensors that they are."""
    return without_overrides()


def leaves_of(
    module: nn.Module, prefix: str = "", *, apart: Collection[nn.Module] = (), strict: bool = True
) -> list[Leaf]:
    """Return the plain tensors of a module and all within it, each object once.

    `apart`: modules within it that are left out. A parameter of a kind that cannot be taken apart
    is an :class:`OffloadError`, or left out unless `strict`.
    """
    found: dict[int, Leaf] = {}
    without = {id(each) for each in apart}
    for path, part in _modules(module, prefix, without):
        for table, is_buffer in ((own_parameters(part), False), (own_buffers(part), True)):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                for inner_name, inner in _inside(name, tensor, strict and not is_buffer):
                    known = found.setdefault(id(inner), Leaf(inner_name, inner, tensor, is_buffer))
                    if inner_name != known.name:
                        known.aliases.append(inner_name)
    return list(found.values())


def _modules(module: nn.Module, path: str, without: set[int]) -> Iterator[tuple[str, nn.Module]]:
    yield path, module
    for name, child in children_of(module).items():
        if child is not None and id(child) not in without:
            yield from _modules(child, f"{path}.{name}" if path else name, without)


def _inside(name: str, tensor: Tensor, strict: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors of which a tensor is made, itself if it is one."""
    if hasattr(tensor, "__tensor_flatten__"):
        for each, inner in inner_tensors(tensor):
            yield from _inside(f"{name}:{each}", inner, strict)
        return
    if is_movable(tensor):
        yield name, tensor
        return
    if not strict:
        return
    raise OffloadError(
        f"got {name} of the class {type(tensor).__name__} ({tensor.dtype}, {tensor.layout}), "
        "expected tensors with memory of their own, or of a class with __tensor_flatten__: name "
        "its module in resident=[...] to leave it where it is"
    )


def inner_tensors(tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors that a subclass says it holds; DTensor names its mesh beside them."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    held = [(name, getattr(tensor, name)) for name in names]
    return [(name, each) for name, each in held if isinstance(each, Tensor)]


def is_movable(tensor: Tensor) -> bool:
    """Whether exchanging the memory of a tensor exchanges its values."""
    wrapped = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if wrapped or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return not isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer)


def put_data(tensor: Tensor, data: Tensor) -> None:
    """Exchange the memory of a tensor; the object, its class and its gradient's ways stay."""
    with plain():
        tensor.data = data


def within_storage(tensor: Tensor) -> tuple[object, int, int]:
    """Return whose memory a tensor is, and the first byte and the end of what it uses there.

    Real memory is told by addresses, so that two storages over one memory are one; memory on no
    device by the storage, for its addresses are all 0.
    """
    with plain():
        size = tensor.element_size()
        extent = (
            0
            if tensor.numel() == 0
            else sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        )
        if tensor.is_meta:
            start = int(tensor.storage_offset()) * size
            return ("meta", storage_identity(tensor)), start, start + extent * size
        start = tensor.data_ptr()
        return str(tensor.device), start, start + extent * size
