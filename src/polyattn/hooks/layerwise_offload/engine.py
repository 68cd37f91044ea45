"""Decides what is where: which unit fills which slot, and when it may.

The rule that makes races impossible: a slot is filled only when nobody uses it, after all that was
computed from it, and only if nobody else holds its memory; a unit is shown only when its slot is
filled. What was not foreseen is loaded on the spot, and what does not fit gets a slot more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.devices import Carrier, Fetch
from polyattn.hooks.layerwise_offload.meter import Meter
from polyattn.hooks.layerwise_offload.order import LearnedOrder
from polyattn.hooks.layerwise_offload.segments import Place
from polyattn.hooks.layerwise_offload.slots import Slot, Slots
from polyattn.hooks.layerwise_offload.unit import Unit
from polyattn.torch.internals import current_graph_task

__all__ = ["Engine", "Use"]


class Use:
    """One use of a unit, from `enter` to `leave`."""

    __slots__ = ("began", "done", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.began: Any = None  # when the computation got to it
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
        self.order = LearnedOrder([unit.index for unit in units])
        self._rehome = rehome
        largest = max((unit.nbytes for unit in units), default=0)
        sizes = slot_bytes if slot_bytes is not None else [largest] * (depth + 1)
        self.slots = Slots(carrier, self.meter, sizes)
        self._lock = threading.RLock()
        self._passes = 0
        self._backward = -1  # the backward pass that runs, as autograd numbers them
        self._process = os.getpid()
        self._closed = False
        self._copying: list[Fetch] = []  # from weights that anybody may change after the pass

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
            if self._passes or self._closed:
                return
            if failed:
                self.order.abandon()
            else:
                self.order.end()
            self.meter.end()
            self._finish_copies()
            for slot in self.slots:
                if slot.is_unused:
                    self.slots.forget_unless_sure(slot)

    def hint(self) -> str:
        """Return what an error about devices may come from: weights that nobody called for."""
        unseen = [
            unit.name for unit in self.units.values() if not self.meter.units[unit.index].uses
        ]
        return (
            "polyattn.hooks.offload brings weights when their module is called. Not called so far: "
            f"{', '.join(unseen[:4]) or 'none'}{', ...' if len(unseen) > 4 else ''}. Name modules "
            "whose weights others read in resident=[...], or use handle.loaded(name)."
        )

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
            if self._closed:  # by another thread: the weights are where they belong
                use.done = True
                return use
            if unit.uses == 0:
                self._look_for_changes(unit)
            slot, missed = self._bring(unit)
            unit.uses += 1
            fetch = slot.fetch
        try:
            self.fetch_ahead()
            self._show(use, slot, fetch, missed)
        except BaseException as error:
            with self._lock:
                if not use.done:
                    unit.uses -= 1
                if slot.fetch is fetch and unit.shown is None:
                    self.slots.empty(slot)
                if self._closed and isinstance(error, CancelledError):
                    use.done = True  # it was detached while this waited
                    return use
            raise
        return use

    def _show(self, use: Use, slot: Slot, fetch: Fetch | None, missed: bool) -> None:
        """Wait for a slot to be filled, and let the unit be what it holds."""
        unit, asked = use.unit, self.carrier.stamp()
        if fetch is not None:
            self.carrier.await_filled(fetch)
        with self._lock:
            if self._closed:
                unit.uses -= 1
                use.done = True
                return
            use.began = self.meter.used(unit.index, fetch, asked, missed)
            self._note_use(slot, unit)
            if unit.shown is None:
                unit.show(slot.memory)

    def leave(self, use: Use) -> None:
        """Let a unit go; what was changed in it goes home first."""
        with self._lock:
            if use.done:
                return
            use.done = True
            unit = use.unit
            if self._closed:  # whoever detached has seen to the weights
                unit.uses -= 1
                return
            self.meter.left(unit.index, use.began)
            try:
                if unit.uses == 1:
                    self._hide(unit)
            finally:
                unit.uses -= 1
                slot = self.slots.of(unit)
                if unit.uses == 0 and slot is not None and not self._passes:
                    self._finish_copies()
                    self.slots.forget_unless_sure(slot)
            if unit.uses == 0:
                self._fetch_ahead()

    @contextmanager
    def using(self, unit: Unit) -> Iterator[Unit]:
        """A unit is here within the scope, and goes home afterwards with what was changed."""
        use = self.enter(unit)
        try:
            yield unit
        finally:
            try:
                with self._lock:
                    self._take_home(unit)
            finally:
                self.leave(use)

    def borrow(self, unit: Unit, place: Place) -> Tensor:
        """Return a view of a unit's slot, filled, as backward asks for it.

        The view keeps the slot from being filled with anything else as long as it lives, and is
        made before another thread may look for a slot.
        """
        with self._lock:
            if self._closed:
                raise OffloadError(
                    f"got a backward pass through {unit.name} after detach(), expected it before, "
                    "for what it needs of the weights streams: call backward first"
                )
            if unit.uses == 0:
                self._look_for_changes(unit)
            slot, missed = self._bring(unit)
            asked = self.carrier.stamp()
            if slot.fetch is not None:
                self.carrier.await_filled(slot.fetch)
            self.meter.used(unit.index, slot.fetch, asked, missed)
            self._note_use(slot, unit)
            return place.over(slot.memory)

    def fetch_ahead(self) -> None:
        """Begin to fetch what is expected next, as far as there are slots for it."""
        with self._lock:
            self._fetch_ahead()

    def give_back_added(self) -> None:
        """Let slots go that were added beyond the plan and are not in use."""
        with self._lock:
            self.slots.give_back_added()

    def _bring(self, unit: Unit) -> tuple[Slot, bool]:
        """Return the slot that holds a unit or will, and whether it was not foreseen."""
        self.order.used(unit.index)
        slot = self.slots.of(unit)
        missed = slot is None
        if slot is None:
            wanted = list(self.order.expected()) if self._passes else []
            slot = self.slots.fill(self.slots.for_now(unit, wanted), unit)
        self.slots.used(slot)
        return slot, missed

    def _note_use(self, slot: Slot, unit: Unit) -> None:
        """This thread's stream computes from a slot from now on."""
        slot.streams.add(self.carrier.stream())
        if slot.fetch is not None and unit.home.tier == "host":
            self._copying.append(slot.fetch)

    def _finish_copies(self) -> None:
        for fetch in self._copying:
            self.carrier.finish(fetch)
        self._copying.clear()

    def _fetch_ahead(self) -> None:
        if not self._passes or self.depth == 0 or self._closed:
            return
        soon: list[int] = []
        for index in self.order.expected():
            if index not in soon:
                soon.append(index)
            if len(soon) == self.depth:
                break
        for index in soon:
            unit = self.units[index]
            if self.slots.of(unit) is not None or self._is_changed(unit):
                continue  # its use will see to a change
            slot = self.slots.for_soon(unit, soon)
            if slot is None:
                return
            self.slots.fill(slot, unit)

    # -- changes ----------------------------------------------------------------------------------

    @staticmethod
    def _is_changed(unit: Unit) -> bool:
        return unit.was_counted() or unit.was_replaced() or unit.home.is_changed()

    def settle(self, unit: Unit) -> None:
        """See to what was changed in a unit at home now, instead of at its next use."""
        with self._lock:
            if unit.uses == 0:
                self._look_for_changes(unit)

    def _look_for_changes(self, unit: Unit) -> None:
        """If somebody changed the unit at home since it was last used, no copy of it is good."""
        if not self._is_changed(unit):
            return
        slot = self.slots.of(unit)
        if slot is not None:
            self.slots.empty(slot)
        if unit.was_replaced() or unit.home.tier == "disk":
            self._rehome(unit)
        unit.note_versions()

    def _hide(self, unit: Unit) -> None:
        """Let a unit be its home again, which first gets what was changed in the slot."""
        if unit.shown is None:
            return
        replaced = unit.was_replaced()
        if replaced or unit.was_counted():
            try:
                self._store(unit, replaced)
            except BaseException:
                unit.hide_but_replaced()
                raise
        if replaced:
            slot = self.slots.of(unit)
            if slot is not None:
                self.slots.empty(slot)
        unit.hide()

    def _take_home(self, unit: Unit) -> None:
        """Bring what a unit's slot holds to its home, and go on showing it."""
        shown = unit.shown
        if shown is None or self._closed or unit.was_replaced():
            return  # who leaves last sees to it
        self._store(unit, False)
        unit.show(shown)

    def _store(self, unit: Unit, replaced: bool) -> None:
        """Have the unit's home hold what it is now; on an error it holds it in memory at least."""
        assert unit.shown is not None
        slot = self.slots.of(unit)
        self.carrier.wait_for(() if slot is None else slot.users)
        self.meter.bytes_written_back += unit.nbytes
        try:
            if replaced or unit.home.tier == "disk":  # no file is written to: it gets another
                self._rehome(unit)
                return
        except BaseException:
            self._write_back(unit)
            raise
        self._write_back(unit)

    def _write_back(self, unit: Unit) -> None:
        assert unit.shown is not None
        memory = zip(unit.home.segments(), unit.layout.offsets, strict=True)
        self.carrier.write_back(unit.shown, memory)

    # -- the end ----------------------------------------------------------------------------------

    def _check_process(self) -> None:
        """In a forked child nobody fills what the parent's threads were filling."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._lock = threading.RLock()
        self.slots.forget_all()

    def close(self) -> None:
        """Wait for all copies and give up the slots; calls that go on have no say any more."""
        with self._lock:
            self._closed = True
            self.slots.close()
            self.carrier.drain()
