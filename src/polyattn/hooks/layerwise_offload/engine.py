"""Decides what is where: which unit fills which slot, and when it may.

The rule that makes races impossible: a slot is filled only when nobody uses it, after all that was
computed from it, and only if nobody else holds its memory; a unit is shown only when its slot is
filled. What was not foreseen is loaded on the spot, and what does not fit gets a slot more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from polyattn.hooks.layerwise_offload.devices import Carrier, Fetch
from polyattn.hooks.layerwise_offload.meter import Meter
from polyattn.hooks.layerwise_offload.order import LearnedOrder
from polyattn.hooks.layerwise_offload.unit import Unit
from polyattn.torch.internals import current_graph_task, storage_holders

__all__ = ["Engine", "Slot", "Use"]


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


class Use:
    """One use of a unit, from `enter` to `leave`."""

    __slots__ = ("done", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.done = False


class Engine:
    """The slots of a device and the units that pass through them.

    >>> from polyattn.hooks.layerwise_offload import LayerwiseOffloadState
    >>> from polyattn.hooks.layerwise_offload.devices.simulated import SimulatedCarrier
    >>> empty = LayerwiseOffloadState(SimulatedCarrier(), [], depth=1, rehome=lambda unit: None)
    >>> len(empty.slots)
    2
    """

    def __init__(
        self,
        carrier: Carrier,
        units: Sequence[Unit],
        *,
        depth: int,
        rehome: Callable[[Unit], None],
        slot_bytes: Sequence[int] | None = None,
    ) -> None:
        """`rehome` gives a unit whose tensors were changed a home that holds them so."""
        self.carrier = carrier
        self.units = {unit.index: unit for unit in units}
        self.depth = depth
        self.meter = Meter(carrier)
        self._turn = 0
        self.order = LearnedOrder([unit.index for unit in units])
        self._rehome = rehome
        largest = max((unit.nbytes for unit in units), default=0)
        sizes = slot_bytes if slot_bytes is not None else [largest] * (depth + 1)
        self.slots = [Slot(carrier.slot(size)) for size in sizes]
        self._had: dict[int, Slot] = {}  # the slot that a unit was in last
        self._lock = threading.RLock()
        self._passes = 0
        self._backward = -1  # the backward pass that runs, as autograd numbers them
        self._process = os.getpid()

    # -- passes -----------------------------------------------------------------------------------

    def begin(self, kind: str) -> None:
        """A pass begins: within it the weights do not change, so they may be fetched ahead."""
        with self._lock:
            self._check_process()
            if self._backward != -1 and current_graph_task() == -1:
                self._end_backward()  # an error in it kept its end from being told
            self._passes += 1
            if self._passes == 1:
                self.order.begin(kind)
                self.meter.begin()
                self._fetch_ahead()

    def end(self, *, failed: bool = False) -> None:
        """A pass is over: what was fetched ahead may be stale when the next one begins."""
        with self._lock:
            if self._passes == 0:
                return
            self._passes -= 1
            if self._passes:
                return
            if failed:
                self.order.abandon()
            else:
                self.order.end()
            self.meter.end()
            for slot in self.slots:
                if slot.is_unused:
                    self._forget_unless_sure(slot)

    def begin_backward(self, task: int, at_end: Callable[[Callable[[], None]], None]) -> None:
        """A backward pass reaches a unit; `at_end` has a function called when it is over."""
        with self._lock:
            if task in (-1, self._backward):
                return
            if self._backward != -1:
                self._end_backward()
            self.begin("backward")
            self._backward = task
            at_end(self._end_backward)

    def _end_backward(self) -> None:
        with self._lock:
            if self._backward != -1:
                self._backward = -1
                self.end()

    # -- uses -------------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> Use:
        """Bring a unit, show it, and keep it until `leave`."""
        use = Use(unit)
        with self._lock:
            self._check_process()
            if unit.uses == 0:
                self._look_for_changes(unit)
            slot, missed = self._bring(unit)
            unit.uses += 1
            fetch = slot.fetch
            self._fetch_ahead()
        try:
            stood = 0.0 if fetch is None else self.carrier.await_filled(fetch)
        except BaseException:
            with self._lock:
                unit.uses -= 1
                self._empty(slot)
            raise
        with self._lock:
            self.meter.used(unit.index, fetch, stood, missed)
            slot.streams.add(self.carrier.stream())
            if unit.shown is None:
                unit.show(slot.memory)
        return use

    def leave(self, use: Use) -> None:
        """Let a unit go; what was changed in it goes home first."""
        with self._lock:
            if use.done:
                return
            use.done = True
            unit = use.unit
            unit.uses -= 1
            self.meter.left(unit.index)
            if unit.uses == 0:
                self._hide(unit)
                slot = self._slot_of(unit)
                if self._passes:
                    self._fetch_ahead()
                elif slot is not None:
                    self._forget_unless_sure(slot)

    @contextmanager
    def using(self, unit: Unit) -> Iterator[Unit]:
        """A unit is here within the scope, and goes home afterwards with what was changed."""
        use = self.enter(unit)
        try:
            yield unit
        finally:
            with self._lock:
                self._take_home(unit)
            self.leave(use)

    def borrow(self, unit: Unit) -> Tensor:
        """Return a unit's slot, filled, for who takes a view of it at once, as backward does.

        The view keeps the slot from being filled with anything else as long as it lives.
        """
        with self._lock:
            slot, missed = self._bring(unit)
            stood = 0.0 if slot.fetch is None else self.carrier.await_filled(slot.fetch)
            self.meter.used(unit.index, slot.fetch, stood, missed)
            slot.streams.add(self.carrier.stream())
            return slot.memory

    def fetch_ahead(self) -> None:
        """Begin to fetch what is expected next, as far as there are slots for it."""
        with self._lock:
            self._fetch_ahead()

    # -- slots ------------------------------------------------------------------------------------

    def _bring(self, unit: Unit) -> tuple[Slot, bool]:
        """Return the slot that holds a unit or will, and whether it was not foreseen."""
        self.order.used(unit.index)
        self._turn += 1
        slot = self._slot_of(unit)
        missed = slot is None
        if slot is None:
            slot = self._fill(self._choose(unit) or self._one_more(unit), unit)
        slot.turn = self._turn
        return slot, missed

    def _slot_of(self, unit: Unit) -> Slot | None:
        return next((slot for slot in self.slots if slot.unit is unit), None)

    def _one_more(self, unit: Unit) -> Slot:
        """All slots are in use, by blocks within blocks or by other threads."""
        self.slots.append(Slot(self.carrier.slot(unit.nbytes)))
        self.meter.slots_added += 1
        self.meter.bytes_added += unit.nbytes
        return self.slots[-1]

    def _fill(self, slot: Slot, unit: Unit) -> Slot:
        if slot.fetch is not None:
            self.carrier.abandon(slot.fetch)
        if slot.memory.numel() < unit.nbytes:
            self.meter.bytes_added += unit.nbytes - slot.memory.numel()
            slot = self._renew(slot, unit.nbytes)
        slot.unit, self._had[unit.index] = unit, slot
        users = [stream for stream in slot.streams if stream is not None]
        slot.streams = set()
        slot.fetch = self.carrier.fetch(unit.home, slot.memory, unit.nbytes, users)
        return slot

    def _renew(self, slot: Slot, nbytes: int) -> Slot:
        """Put new memory in the place of a slot's; the old goes with who holds it."""
        fresh = Slot(self.carrier.slot(nbytes))
        self.slots[self.slots.index(slot)] = fresh
        return fresh

    def _choose(self, unit: Unit) -> Slot | None:
        """Return the slot to fill for a unit that is needed now; None if all are in use."""
        wanted = list(self.order.expected()) if self._passes else []
        unused = [slot for slot in self.slots if slot.is_unused]
        for slot in unused:
            if slot.fetch is not None and slot.unit is None:
                self.carrier.abandon(slot.fetch)
                slot.fetch = None
        free = [slot for slot in unused if not slot.is_held]
        if free:
            return min(free, key=lambda slot: self._worth(slot, unit, wanted))
        for slot in unused:
            if slot.fetch is not None and not slot.fetch.is_done:  # only being filled, it may be
                self.carrier.abandon(slot.fetch)
                slot.unit = slot.fetch = None
            if not slot.is_held:
                return slot
        for slot in unused:
            self.meter.slots_given_up += 1
            self.meter.bytes_added += slot.memory.numel()
            return self._renew(slot, slot.memory.numel())
        return None

    def _fetch_ahead(self) -> None:
        if not self._passes or self.depth == 0:
            return
        soon: list[int] = []
        for index in self.order.expected():
            if index not in soon:
                soon.append(index)
            if len(soon) == self.depth:
                break
        for index in soon:
            unit = self.units[index]
            if self._slot_of(unit) is not None or self._is_changed(unit):
                continue  # its use will see to a change
            free = [
                slot
                for slot in self.slots
                if slot.is_unused
                and (slot.unit is None or slot.unit.index not in soon)
                and not slot.is_held
            ]
            if not free:
                return
            self._fill(min(free, key=lambda slot: self._worth(slot, unit, soon)), unit)

    def _worth(self, slot: Slot, unit: Unit, wanted: Sequence[int]) -> tuple[int, bool, bool, int]:
        """How much is lost by filling a slot: how soon its unit is needed; that it is another's.

        A unit that gets the slot that it had before keeps its addresses from pass to pass.
        """
        soon = 0
        if slot.unit is not None and slot.unit.index in wanted:
            soon = len(wanted) - wanted.index(slot.unit.index)
        another = self._had.get(unit.index) is not slot
        return soon, another, slot.memory.numel() < unit.nbytes, slot.turn

    def _empty(self, slot: Slot) -> None:
        if slot.fetch is not None:
            self.carrier.abandon(slot.fetch)
        slot.unit = slot.fetch = None

    def _forget_unless_sure(self, slot: Slot) -> None:
        """Outside a pass anybody may change a weight at home; only some homes would tell."""
        if slot.unit is not None and not slot.unit.home.sees_writes:
            slot.unit = None

    # -- changes ----------------------------------------------------------------------------------

    @staticmethod
    def _is_changed(unit: Unit) -> bool:
        return unit.was_counted() or unit.was_replaced() or unit.home.is_changed()

    def _look_for_changes(self, unit: Unit) -> None:
        """If somebody changed the unit at home since it was last used, no copy of it is good."""
        if not self._is_changed(unit):
            return
        slot = self._slot_of(unit)
        if slot is not None:
            self._empty(slot)
        if unit.was_replaced() or unit.home.tier == "disk":
            self._rehome(unit)
        unit.note_versions()

    def _hide(self, unit: Unit) -> None:
        """Let a unit be its home again, which first gets what was changed in the slot."""
        if unit.shown is not None and unit.was_replaced():
            slot = self._slot_of(unit)
            if slot is not None:
                self._empty(slot)
            self._rehome(unit)
        elif unit.shown is not None and unit.was_counted():
            self._take_home(unit)
        unit.hide()

    def _take_home(self, unit: Unit) -> None:
        """Bring what a unit's slot holds to its home."""
        if unit.shown is None:
            return
        self.meter.bytes_written_back += unit.nbytes
        if unit.home.tier == "disk":  # no file is ever written to: it gets another
            slot = unit.shown
            self._rehome(unit)
            unit.show(slot)
        else:
            memory = zip(unit.home.segments(), unit.layout.offsets, strict=True)
            self.carrier.write_back(unit.shown, memory)
        unit.note_versions()

    def _check_process(self) -> None:
        """In a forked child nobody fills what the parent's threads were filling."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._lock = threading.RLock()
        for slot in self.slots:
            slot.unit, slot.fetch, slot.streams = None, None, set()

    def close(self) -> None:
        """Wait for all copies and give up the slots."""
        with self._lock:
            for slot in self.slots:
                self._empty(slot)
            self.carrier.drain()
            self.slots = []
