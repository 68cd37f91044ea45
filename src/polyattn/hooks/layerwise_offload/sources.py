"""Where a unit's weights lie while they are not on the device: on the host, or in files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.exact_memory import Block, Lock
from polyattn.hooks.layerwise_offload.mapped import FilePart, MappedFile, Mapping, can_see_changes
from polyattn.hooks.layerwise_offload.segments import ALIGNMENT, Layout

__all__ = ["FileSource", "HostSource", "Source"]


class Source(Protocol):
    """The home of a unit's bytes."""

    tier: str
    sees_writes: bool
    """Whether `is_changed` notices every write, also one that goes past torch's count."""
    is_closed: bool

    def segments(self) -> list[Tensor]:
        """Return the bytes of each segment as memory: what the weights are while they are away."""
        ...

    def is_changed(self) -> bool:
        """Whether somebody wrote into the segments."""
        ...

    def is_changed_at(self, index: int) -> bool:
        """Whether somebody wrote into one of the segments."""
        ...

    def check(self) -> None:
        """Raise if the segments do not hold the weights any more, for their file was written to."""
        ...

    def read(self, index: int, start: int, into: memoryview) -> None:
        """Read bytes of a segment, from byte `start` on, without mapping what lies in a file."""
        ...

    def reads(self, slot: Tensor) -> list[tuple[FilePart, memoryview]]:
        """Return what to read from files, and where in a slot on the host to; [] for memory."""
        ...

    def copies(self, slot: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return what to copy from memory, and where in a slot to; [] for files."""
        ...

    def close(self) -> None:
        """Give back what it holds; tensors over its memory stay."""
        ...


class HostSource:
    """A unit in host memory, as one block, so that one copy fetches it."""

    tier = "host"
    sees_writes = False

    def __init__(self, layout: Layout, *, lock: bool = False) -> None:
        self.is_closed = False
        self._layout = layout
        self._block = Block(layout.nbytes)
        self._lock = Lock(self._block.whole) if lock and layout.nbytes else None
        self._segments = [
            self._block.part(offset, segment.nbytes)
            for offset, segment in zip(layout.offsets, layout.segments, strict=True)
        ]

    def segments(self) -> list[Tensor]:
        return self._segments

    def is_changed(self) -> bool:
        return False

    def is_changed_at(self, index: int) -> bool:
        return False

    def check(self) -> None:
        """Memory is nobody else's."""

    def read(self, index: int, start: int, into: memoryview) -> None:
        into[:] = self._segments[index][start : start + len(into)].numpy().data

    def reads(self, slot: Tensor) -> list[tuple[FilePart, memoryview]]:
        return []

    def copies(self, slot: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(self._block.whole, slot[: self._layout.nbytes])]

    def close(self) -> None:
        self.is_closed = True
        if self._lock is not None:
            self._lock.release()


class FileSource:
    """A unit in one or more files; while it is away its weights are the files, mapped."""

    tier = "disk"

    def __init__(
        self, layout: Layout, parts: Sequence[FilePart], *, own: MappedFile | None = None
    ) -> None:
        """`parts`: where each segment of the layout lies. `own`: a file that is closed with it."""
        self.is_closed = False
        self._own = own
        self._layout = layout
        self._parts = list(parts)
        self._mappings = [_mapping(part) for part in self._parts]
        self._segments = [
            torch.empty(0, dtype=torch.uint8) if m is None else m.tensor(0, part.nbytes)
            for m, part in zip(self._mappings, self._parts, strict=True)
        ]
        self.sees_writes = can_see_changes()
        self._runs = _runs(self._parts, layout.offsets)

    @property
    def own_path(self) -> Path | None:
        """The file that was made for it alone."""
        return None if self._own is None else self._own.path

    @property
    def parts(self) -> list[FilePart]:
        """Where the bytes lie."""
        return self._parts

    def segments(self) -> list[Tensor]:
        return self._segments

    def is_changed(self) -> bool:
        return any(m.is_changed() for m in self._mappings if m is not None)

    def is_changed_at(self, index: int) -> bool:
        mapping = self._mappings[index]
        return mapping is not None and mapping.is_changed()

    def check(self) -> None:
        for mapping, part in zip(self._mappings, self._parts, strict=True):
            if mapping is not None:
                try:
                    part.file.check()
                except OffloadError:
                    if not mapping.is_apart():
                        raise

    def read(self, index: int, start: int, into: memoryview) -> None:
        part = self._parts[index]
        part.file.read(part.start + start, into)

    def reads(self, slot: Tensor) -> list[tuple[FilePart, memoryview]]:
        if not self.sees_writes:
            return []
        memory = slot.numpy().data
        return [
            (part, memory[offset : offset + part.nbytes])
            for part, offset in zip(*self._runs, strict=True)
        ]

    def copies(self, slot: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Where writes go unseen, what they wrote must be what is copied: the mapping itself."""
        if self.sees_writes:
            return []
        return list(zip(self._segments, self._layout.memory_of(slot), strict=True))

    def close(self) -> None:
        """Close a file of its own; others hold other units too. Mappings need none."""
        self.is_closed = True
        if self._own is not None:
            self._own.close()


def _runs(parts: Sequence[FilePart], offsets: Sequence[int]) -> tuple[list[FilePart], list[int]]:
    """Join parts that lie in one file as they lie in a slot, gaps included: one read."""
    runs: list[FilePart] = []
    starts: list[int] = []
    for part, offset in zip(parts, offsets, strict=True):
        if not part.nbytes:
            continue
        if runs and runs[-1].file is part.file:
            gap = part.start - runs[-1].start - runs[-1].nbytes
            if 0 <= gap < ALIGNMENT and part.start - runs[-1].start == offset - starts[-1]:
                whole = part.start + part.nbytes - runs[-1].start
                runs[-1] = FilePart(part.file, runs[-1].start, whole)
                continue
        runs.append(part)
        starts.append(offset)
    return runs, starts


def _mapping(part: FilePart) -> Mapping | None:
    return Mapping(part.file, part.start, part.nbytes) if part.nbytes else None
