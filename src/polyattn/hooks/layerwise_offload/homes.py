"""Gives units a home: locked host memory, the model's own files, or files of ours."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.leaves import Leaf, plain
from polyattn.hooks.layerwise_offload.mapped import FilePart
from polyattn.hooks.layerwise_offload.own_files import OwnFiles
from polyattn.hooks.layerwise_offload.safetensors_files import SafetensorsFiles, StoredTensor
from polyattn.hooks.layerwise_offload.segments import Layout, Segment, bytes_of
from polyattn.hooks.layerwise_offload.sources import FileSource, HostSource, Source

__all__ = ["Homes"]

_CHUNK = 2 << 20
"""What is compared at once: a weight that was changed is compared within a budget."""


class Homes:
    """Where the weights of a model live while they are away."""

    def __init__(
        self,
        *,
        disk: str | Path | None = None,
        weights: Any = None,
        lock: bool = False,
        keep_files: bool = False,
    ) -> None:
        self._own = OwnFiles(disk, keep=keep_files) if disk is not None else None
        self._files = SafetensorsFiles(weights) if weights is not None else None
        self._named: Mapping[str, StoredTensor] = {}
        self._lock = lock
        self._differ: list[str] = []

    @property
    def tier(self) -> str:
        """Where units live: ``disk`` if there are files, else ``host``."""
        return "host" if self._own is None and self._files is None else "disk"

    def know(self, leaves: list[Leaf]) -> None:
        """Learn the names of all tensors, and raise for those that are nowhere."""
        if self._files is not None:
            names = [name for leaf in leaves for name in (leaf.name, *leaf.aliases)]
            self._named = self._files.named_for(names)
        lost = [
            leaf
            for leaf in leaves
            if leaf.tensor.is_meta and leaf.tensor.numel() and self.stored(leaf) is None
        ]
        if lost:
            raise OffloadError(
                f"got {len(lost)} tensors without values that are in no file "
                f"({_some([leaf.name for leaf in lost])}), expected all of them in weights=, or in "
                f"memory: {_advice(lost)}"
            )

    def require(self, nbytes: int) -> None:
        """Raise unless our own files, if there are to be any, fit on the disk."""
        if self._own is not None and self._files is None:
            self._own.require(nbytes)

    def stored(self, leaf: Leaf) -> StoredTensor | None:
        """Return the tensor of the model's files that has a leaf's name, kind and shape."""
        for name in (leaf.name, *leaf.aliases):
            found = self._named.get(name)
            if found is None:
                continue
            if found.dtype == leaf.tensor.dtype and found.shape == tuple(leaf.tensor.shape):
                return found
            if leaf.tensor.is_meta:
                raise OffloadError(
                    f"got {found.name} in {found.file.path} as {found.dtype} {found.shape}, "
                    f"expected {leaf.tensor.dtype} {tuple(leaf.tensor.shape)} of the model: make "
                    "the model in the dtype of its file"
                )
        return None

    def make(self, layout: Layout) -> Source:
        """Return a home that holds the bytes of a unit as they are now."""
        parts = [self._in_files(segment) for segment in layout.segments]
        if all(part is not None for part in parts) and parts:
            return FileSource(layout, [part for part in parts if part is not None])
        if any(leaf.tensor.is_meta for segment in layout.segments for leaf in segment.leaves):
            raise OffloadError(
                f"got {layout.segments[0].names[0]} and others, some of which are only partly in "
                "the files, expected whole units there"
            )
        memory = [bytes_of(segment) for segment in layout.segments]
        if self._own is not None:
            return self._own.put(layout, memory)
        home = HostSource(layout, lock=self._lock)
        for to, given in zip(home.segments(), memory, strict=True):
            to.copy_(given)
        return home

    def replaced(self, home: Source) -> None:
        """A unit has another home now: take away the file of the old one."""
        home.close()
        if self._own is not None and isinstance(home, FileSource) and home.own_path is not None:
            self._own.drop(home.own_path)

    def _in_files(self, segment: Segment) -> FilePart | None:
        """Return where a segment lies in the model's files, if its bytes really are there."""
        for leaf, place in zip(segment.leaves, segment.places, strict=True):
            found = self.stored(leaf)
            whole = place.offset == 0 and found is not None and found.nbytes == segment.nbytes
            if not whole or found is None or not _is_contiguous(place.shape, place.strides):
                continue
            if leaf.tensor.is_meta or _equal(found, bytes_of(segment)):
                return FilePart(found.file, found.start, found.nbytes)
            self._differ.append(leaf.name)
        return None

    def warn_of_others(self) -> None:
        """Warn of tensors that had other values in memory than in the model's files until now."""
        if self._differ:
            kept = "host memory" if self._own is None else "disk="
            warnings.warn(
                f"got {len(self._differ)} tensors with other values in memory than in weights= "
                f"({_some(self._differ)}): those in memory are kept, and stream from {kept}. If "
                "the file's are meant, make the model on the meta device or load them first.",
                stacklevel=4,
            )

    def close(self) -> None:
        """Give back files; what is mapped stays mapped."""
        if self._own is not None:
            self._own.close()
        if self._files is not None:
            self._files.close()


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _equal(stored: StoredTensor, memory: Tensor) -> bool:
    """Compare what a file holds with what the model holds; names prove nothing."""
    buffer = bytearray(min(_CHUNK, stored.nbytes))
    for start in range(0, stored.nbytes, _CHUNK):
        part = memoryview(buffer)[: min(_CHUNK, stored.nbytes - start)]
        stored.file.read(stored.start + start, part)
        with plain(), torch.no_grad():
            theirs = torch.frombuffer(part, dtype=torch.uint8)
            if not torch.equal(theirs, memory[start : start + len(part)].cpu()):
                return False
    return True


def _advice(lost: list[Leaf]) -> str:
    """Say what to do about tensors that have no values: weights and buffers lack them otherwise."""
    found = []
    if any(not leaf.is_buffer for leaf in lost):
        found.append(
            "a library may store weights under other names, or in other parts, than its model has "
            "them, as transformers does with experts: load the model as the library does, and give "
            "disk= a folder"
        )
    if any(leaf.is_buffer for leaf in lost):
        found.append(
            "make the model in polyattn.hooks.layerwise_offload.without_weights() instead of "
            'torch.device("meta"), which computes the buffers that a checkpoint leaves out'
        )
    return "; ".join(found)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
