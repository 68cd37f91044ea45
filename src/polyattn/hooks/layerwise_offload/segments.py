"""Bytes that lie together: tensors that share memory are one segment, moved and counted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.leaves import Leaf, plain, within_storage
from polyattn.torch.internals import negated_view

__all__ = ["ALIGNMENT", "Layout", "Place", "Segment", "bytes_of", "segments_of"]

ALIGNMENT = 256
"""Where segments begin, in bytes: what CUDA's own allocator gives, and more than vectors need."""


@dataclass(frozen=True, slots=True)
class Place:
    """How a tensor lies in its segment: its first byte there, and its shape over the memory."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool = False
    is_neg: bool = False
    is_inference: bool = False

    @classmethod
    def of(cls, tensor: Tensor, offset: int) -> Place:
        """Return the place of a tensor that begins `offset` bytes after its memory does."""
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        marks = tensor.is_conj(), tensor.is_neg(), tensor.is_inference()
        return cls(offset, shape, strides, tensor.dtype, *marks)

    def over(self, memory: Tensor) -> Tensor:
        """Return the tensor over `memory`, the bytes of the segment (uint8, one dimension)."""
        start = int(memory.storage_offset()) + self.offset
        size = self.dtype.itemsize
        # an inference tensor with the memory of an ordinary one is neither: torch takes it for one
        # that counts its changes, and fails
        with torch.inference_mode(self.is_inference), torch.no_grad():
            empty = torch.empty(0, dtype=self.dtype, device=memory.device)
            found = empty.set_(memory.untyped_storage(), start // size, self.shape, self.strides)
            # views that torch only marks, and does not compute: the same bytes, other values
            found = torch.conj(found) if self.is_conj else found
            return negated_view(found) if self.is_neg else found


@dataclass(slots=True, eq=False)
class Segment:
    """Bytes of memory that one or more tensors use, and who they are."""

    nbytes: int
    leaves: list[Leaf] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its tensors."""
        return tuple(leaf.name for leaf in self.leaves)


def segments_of(leaves: Iterable[Leaf]) -> list[Segment]:
    """Sort tensors into segments by the memory that they use, in order of first appearance."""
    spans = [
        (*within_storage(leaf.tensor), index, leaf)
        for index, leaf in enumerate(leaves)
        if leaf.tensor.numel()  # nothing is nowhere, and stays there
    ]
    groups: list[list[tuple[object, int, int, int, Leaf]]] = []
    end, where = -1, None
    for span in sorted(spans, key=lambda span: (str(span[0]), span[1], -span[2])):
        whose, start, stop, _, _ = span
        if groups and whose == where and start < end:
            groups[-1].append(span)
        else:
            groups.append([span])
            where, end = whose, start
        end = max(end, stop)
    groups.sort(key=lambda group: min(span[3] for span in group))
    return [_segment(group) for group in groups]


def _segment(group: Sequence[tuple[object, int, int, int, Leaf]]) -> Segment:
    first = min(span[1] for span in group)
    segment = Segment(max(span[2] for span in group) - first)
    for _, start, _, _, leaf in sorted(group, key=lambda span: span[3]):
        tensor = leaf.tensor
        if (start - first) % tensor.element_size():
            raise OffloadError(
                f"got {leaf.name}, which shares memory with {segment.names} at a distance that is "
                "no whole number of its elements, expected tensors apart: clone one of them"
            )
        segment.leaves.append(leaf)
        with plain():
            segment.places.append(Place.of(tensor, start - first))
    return segment


def bytes_of(segment: Segment) -> Tensor:
    """Return the memory of a segment as it is now (uint8), without a copy."""
    leaf, place = segment.leaves[0], segment.places[0]
    with plain(), torch.no_grad(), torch.inference_mode(False):
        data = leaf.tensor.detach()
        start = int(data.storage_offset()) * data.element_size() - place.offset
        storage = data.untyped_storage()
        if start < 0 or start + segment.nbytes > storage.nbytes():
            raise OffloadError(
                f"got {segment.names}, which share memory by way of two storages, expected one: "
                "clone one of them"
            )
        empty = torch.empty(0, dtype=torch.uint8, device=data.device)
        return empty.set_(storage, start, (segment.nbytes,), (1,))


class Layout:
    """Where the segments of a unit lie in one block of memory, each at a multiple of 256 bytes."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = list(segments)
        self.offsets: list[int] = []
        end = 0
        for segment in self.segments:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            self.offsets.append(start)
            end = start + segment.nbytes
        self.nbytes = end

    def is_like(self, other: Layout) -> bool:
        """Whether the same tensors lie at the same places."""
        return self._whereabouts() == other._whereabouts()

    def _whereabouts(self) -> list[tuple[int, Place, int]]:
        return [(id(leaf.tensor), place, self.offsets[i]) for leaf, place, i in self.leaves()]

    def memory_of(self, block: Tensor) -> list[Tensor]:
        """Return the part of `block` (uint8) that belongs to each segment."""
        pairs = zip(self.segments, self.offsets, strict=True)
        return [block[offset : offset + segment.nbytes] for segment, offset in pairs]

    def leaves(self) -> list[tuple[Leaf, Place, int]]:
        """Return each tensor, its place, and the index of its segment."""
        return [
            (leaf, place, index)
            for index, segment in enumerate(self.segments)
            for leaf, place in zip(segment.leaves, segment.places, strict=True)
        ]
