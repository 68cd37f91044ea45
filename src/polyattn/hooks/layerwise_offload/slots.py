"""The slots of a device: which is free, what fills which, and what becomes of those that go.

A slot is filled only when nobody uses it and only if nobody else holds its memory, and its memory
goes only when nothing on the device touches it any more: the carrier sees to that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from polyattn.hooks.layerwise_offload.devices import Carrier, Fetch
from polyattn.hooks.layerwise_offload.meter import Meter
from polyattn.hooks.layerwise_offload.unit import Unit
from polyattn.torch.internals import storage_holders

__all__ = ["Slot", "Slots"]


class Slot:
    """Memory on the device that holds a unit at a time; it never moves."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._own_holders = storage_holders(memory)
        self.unit: Unit | None = None
        self.fetch: Fetch | None = None
        self.streams: set[Any] = set()  # where it was used since it was filled
        self.turn = 0  # when it was used last

    @property
    def is_unused(self) -> bool:
        """Whether its unit is not in use."""
        return self.unit is None or self.unit.uses == 0

    @property
    def is_held(self) -> bool:
        """Whether anybody but us holds its memory: a view of a weight, or what autograd saved."""
        return storage_holders(self.memory) > self._own_holders

    @property
    def users(self) -> list[Any]:
        """The streams that may still read it."""
        return [stream for stream in self.streams if stream is not None]


class Slots:
    """All slots of one device, by the rules above; who calls holds the engine's lock."""

    def __init__(self, carrier: Carrier, meter: Meter, sizes: Sequence[int]) -> None:
        self._carrier = carrier
        self._meter = meter
        self._all = [Slot(carrier.slot(size)) for size in sizes]
        self._planned = len(sizes)
        self._had: dict[int, Slot] = {}  # the slot that a unit was in last
        self._turn = 0

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def of(self, unit: Unit) -> Slot | None:
        """Return the slot that a unit is in, or will be."""
        return next((slot for slot in self._all if slot.unit is unit), None)

    def used(self, slot: Slot) -> None:
        """A slot's unit is used now."""
        self._turn += 1
        slot.turn = self._turn

    def fill(self, slot: Slot, unit: Unit) -> Slot:
        """Begin to fill a slot; one that is too small is replaced."""
        if slot.memory.numel() < unit.nbytes:
            slot = self._renewed(slot, unit.nbytes)
        self._give_up_filling(slot)
        slot.unit = None  # whatever goes wrong now, it holds nothing
        slot.fetch = self._carrier.fetch(unit.home, slot.memory, unit.nbytes, slot.users)
        slot.streams = set()
        slot.unit, self._had[unit.index] = unit, slot
        return slot

    def for_now(self, unit: Unit, wanted: Sequence[int]) -> Slot:
        """Return the slot to fill for a unit that is needed now; a new one if all are in use."""
        unused = [slot for slot in self._all if slot.is_unused]
        for slot in unused:
            if slot.unit is None:
                self._give_up_filling(slot)
        free = [slot for slot in unused if not slot.is_held]
        if free:
            return min(free, key=lambda slot: self._worth(slot, unit, wanted))
        for slot in unused:
            if slot.fetch is not None and not slot.fetch.awaited:  # only being filled, it may be
                self.empty(slot)
            if not slot.is_held:
                return slot
        for slot in unused:
            self._meter.slots_given_up += 1
            return self._renewed(slot, slot.memory.numel())
        return self._one_more(unit)

    def for_soon(self, unit: Unit, soon: Sequence[int]) -> Slot | None:
        """Return a slot to fill ahead that nothing as near needs; None if there is none."""
        free = [
            slot
            for slot in self._all
            if slot.is_unused
            and (slot.unit is None or slot.unit.index not in soon)
            and not slot.is_held
        ]
        return min(free, key=lambda slot: self._worth(slot, unit, soon)) if free else None

    def empty(self, slot: Slot) -> None:
        """What a slot holds, or is being filled with, is no good any more."""
        self._give_up_filling(slot)
        slot.unit = None

    def forget_unless_sure(self, slot: Slot) -> None:
        """Outside a pass anybody may change a weight at home; only some homes would tell."""
        if slot.unit is not None and not slot.unit.home.sees_writes:
            slot.unit = None

    def forget_all(self) -> None:
        """In a forked child nobody fills what the parent's threads were filling."""
        for slot in self._all:
            slot.unit, slot.fetch, slot.streams = None, None, set()

    def give_back_added(self) -> None:
        """Let slots go that were added for units at once, as far as they are not in use."""
        for slot in [slot for slot in self._all[self._planned :] if slot.is_unused]:
            self._all.remove(slot)
            self._retire(slot)

    def close(self) -> None:
        """Give up all slots; the carrier was drained before, or is next."""
        for slot in self._all:
            self._retire(slot)
        self._all = []
        self._had.clear()

    # -- memory -----------------------------------------------------------------------------------

    def _one_more(self, unit: Unit) -> Slot:
        """All slots are in use, by blocks within blocks or by other threads."""
        self._all.append(Slot(self._carrier.slot(unit.nbytes)))
        self._meter.slots_added += 1
        self._meter.bytes_added += unit.nbytes
        return self._all[-1]

    def _renewed(self, slot: Slot, nbytes: int) -> Slot:
        """Put new memory in the place of a slot's; the old goes with who still uses it."""
        fresh = Slot(self._carrier.slot(nbytes))
        self._meter.bytes_added += nbytes - (0 if slot.is_held else slot.memory.numel())
        self._all[self._all.index(slot)] = fresh
        self._retire(slot)
        return fresh

    def _retire(self, slot: Slot) -> None:
        self._carrier.retire(slot.memory, slot.fetch, slot.users)
        slot.unit = slot.fetch = None

    def _give_up_filling(self, slot: Slot) -> None:
        if slot.fetch is not None:
            self._carrier.abandon(slot.fetch)
            slot.fetch = None

    def _worth(self, slot: Slot, unit: Unit, wanted: Sequence[int]) -> tuple[int, bool, bool, int]:
        """How much is lost by filling a slot: how soon its unit is needed; that it is another's.

        A unit that gets the slot that it had before keeps its addresses from pass to pass.
        """
        soon = 0
        if slot.unit is not None and slot.unit.index in wanted:
            soon = len(wanted) - wanted.index(slot.unit.index)
        another = self._had.get(unit.index) is not slot
        return soon, another, slot.memory.numel() < unit.nbytes, slot.turn
