"""A unit: what is moved at once, the weights of some modules; at home, or shown in a slot."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from torch import Tensor, nn

from polyattn.hooks.layerwise_offload.leaves import Leaf, inner_tensors, put_data
from polyattn.hooks.layerwise_offload.segments import Layout, Place
from polyattn.hooks.layerwise_offload.sources import Source
from polyattn.torch.internals import is_wrapped_by_transform, own_buffers, own_parameters

__all__ = ["Unit"]

_CHUNK = 1 << 20


class Unit:
    """The weights of some modules, where they live, and where they are shown now.

    At home its tensors are their own values in host memory or in a mapped file; while it is in
    use, the same objects are the bytes of a slot. The objects themselves never change.
    """

    def __init__(
        self, index: int, name: str, modules: Sequence[nn.Module], layout: Layout, home: Source
    ) -> None:
        self.index = index
        self.name = name
        self.modules = tuple(modules)
        self.uses = 0
        self.shown: Tensor | None = None
        self._leaves: list[tuple[Leaf, Place, int]] = []
        self._counted: list[int] = []
        self._changes = 0  # that are told
        self._generations = [0] * len(layout.segments)
        self._settle_in(layout, home)

    def settle_in(self, layout: Layout, home: Source) -> None:
        """Take another home: the unit's tensors become what lies there."""
        self._count_changes()
        if layout.is_like(self.layout):
            for index in range(len(layout.segments)):
                if not _is_same(self.home, home, index):
                    self._note_change(index)
        else:
            self._changes += 1
            self._generations = [self._changes] * len(layout.segments)
        self._settle_in(layout, home)

    def _settle_in(self, layout: Layout, home: Source) -> None:
        self.layout = layout
        self.home = home
        memory = home.segments()
        self._leaves = layout.leaves()
        self._parts = self._parts_now()
        self._at_home = [place.over(memory[index]) for _, place, index in self._leaves]
        self._addresses = [tensor.data_ptr() for tensor in self._at_home]
        self._counted = [leaf.version for leaf, _, _ in self._leaves]
        self.hide()

    @property
    def nbytes(self) -> int:
        """How much is moved."""
        return self.layout.nbytes

    @property
    def leaves(self) -> list[Leaf]:
        """Its tensors."""
        return [leaf for leaf, _, _ in self._leaves]

    def show(self, slot: Tensor) -> None:
        """Let the tensors be the bytes in a slot."""
        self._count_changes()
        memory = self.layout.memory_of(slot)
        for leaf, place, index in self._leaves:
            put_data(leaf.tensor, place.over(memory[index]))
        self.shown = slot
        self.note_versions()
        self._counted = list(self._versions)

    def hide(self) -> None:
        """Let the tensors be what lies at home."""
        self._count_changes()
        for (leaf, _, _), at_home in zip(self._leaves, self._at_home, strict=True):
            put_data(leaf.tensor, at_home)
        self.shown = None
        self.note_versions()
        self._counted = list(self._versions)

    def hide_but_replaced(self) -> None:
        """Let the tensors be what lies at home, but those that were given other memory."""
        if self.shown is None:
            return
        start = self.shown.data_ptr()
        for (leaf, place, index), at_home in zip(self._leaves, self._at_home, strict=True):
            if leaf.address == start + self.layout.offsets[index] + place.offset:
                put_data(leaf.tensor, at_home)
        self.shown = None

    def stay(self, memory: Tensor) -> None:
        """Be the bytes of `memory` for good; what was at home is not needed any more."""
        self.show(memory)
        self._at_home = []

    def generation(self, offset: int) -> int:
        """Return a number that changes with the memory that lies `offset` bytes into the unit.

        It changes where torch counts a change or a new home holds other bytes, and not where the
        same bytes move.
        """
        self._count_changes()
        if not self._generations:  # all of it was taken away
            return self._changes
        return self._generations[bisect_right(self.layout.offsets, offset) - 1]

    def _note_change(self, index: int) -> None:
        self._changes += 1
        self._generations[index] = self._changes

    def _count_changes(self) -> None:
        for which, (leaf, _, index) in enumerate(self._leaves):
            version = leaf.version
            if version != self._counted[which]:
                self._counted[which] = version
                self._note_change(index)

    def note_versions(self) -> None:
        """Take the tensors as they are for unchanged."""
        self._versions = [leaf.version for leaf, _, _ in self._leaves]

    def was_counted(self) -> bool:
        """Whether torch has counted a change of a tensor since it was last shown or hidden."""
        return self._versions != [leaf.version for leaf, _, _ in self._leaves]

    def _parts_now(self) -> list[int]:
        """Return which modules and tensors the unit's modules have now."""
        found: list[int] = []
        for module in self.modules:
            for part in module.modules():
                found.append(id(part))
                for table in (own_parameters(part), own_buffers(part)):
                    for tensor in table.values():
                        found.append(id(tensor))
                        if tensor is not None and hasattr(tensor, "__tensor_flatten__"):
                            found += [id(inner) for _, inner in inner_tensors(tensor)]
        return found

    def _are_lent(self) -> bool:
        """Whether modules have tensors of a transform of torch.func, until their call is over."""
        return any(
            tensor is not None and is_wrapped_by_transform(tensor)
            for module in self.modules
            for part in module.modules()
            for table in (own_parameters(part), own_buffers(part))
            for tensor in table.values()
        )

    def was_replaced(self) -> bool:
        """Whether somebody gave a tensor other memory (``.data = ...``), or it is another now."""
        if self._parts != self._parts_now() and not self._are_lent():
            return True
        if self.shown is None:
            return self._addresses != [leaf.address for leaf, _, _ in self._leaves]
        start = self.shown.data_ptr()
        offsets = self.layout.offsets
        return any(
            leaf.address != start + offsets[index] + place.offset
            for leaf, place, index in self._leaves
        )

    def at_home(self) -> list[tuple[Leaf, Tensor]]:
        """Return each tensor with what it is at home."""
        return [
            (leaf, home) for (leaf, _, _), home in zip(self._leaves, self._at_home, strict=True)
        ]


def _is_same(old: Source, new: Source, index: int) -> bool:
    """Say whether a segment holds the same in another home, in little memory."""
    if old.is_closed or old.is_changed_at(index):  # closed: it stayed on the device meanwhile
        return False
    nbytes = new.segments()[index].numel()
    one, other = (memoryview(bytearray(min(_CHUNK, nbytes))) for _ in range(2))
    for start in range(0, nbytes, _CHUNK):
        size = min(_CHUNK, nbytes - start)
        old.read(index, start, one[:size])
        new.read(index, start, other[:size])
        if one[:size] != other[:size]:
            return False
    return True
