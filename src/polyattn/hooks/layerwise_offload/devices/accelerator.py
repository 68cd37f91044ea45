"""Weights from host memory to an accelerator, by a stream of its own beside the computation's.

The slots' memory is allocated once. Every order between copy and computation is an event: a copy
waits for the computations that still read the slot, and computations wait for the copy. What lies
in files is read by a thread; what was given up meanwhile does not get to the stream any more.
(Written for any device whose torch module has streams and events; it ran on CUDA alone.)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.devices.carrier import Carrier, Fetch
from polyattn.hooks.layerwise_offload.devices.gate import Gate
from polyattn.hooks.layerwise_offload.devices.host import Reader
from polyattn.hooks.layerwise_offload.devices.staging import Staging
from polyattn.hooks.layerwise_offload.sources import Source

__all__ = ["AcceleratorCarrier"]


class _Filling:
    """One filling: the events around its copies, at once or when it was read."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.reading: Future[Any] | None = None
        self.copies: tuple[Any, Any] | None = None
        self.read_s = 0.0

    def events(self) -> tuple[Any, Any]:
        """Return the first and the last event, once the copies are in their stream."""
        if self.copies is None:
            assert self.reading is not None
            self.copies = self.reading.result()
        assert self.copies is not None
        return self.copies


class AcceleratorCarrier(Carrier):
    """Copies by a stream; what lies in files goes by way of two locked blocks of host memory."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        if not self._module.is_available():
            raise OffloadError(
                f"got device={str(device)!r}, which is not here, expected one that is: "
                "'cpu' runs from files"
            )
        if device.index is not None and device.index >= self._module.device_count():
            raise OffloadError(
                f"got device={str(device)!r}, expected one of the {self._module.device_count()} "
                f"that are here, {device.type}:0 the first"
            )
        index = self._module.current_device() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self.locks_host = device.type == "cuda"
        self._copies = self._module.Stream(device=self.device)
        self._reader = Reader()
        self._staging = Staging(locked=self.locks_host)
        self._retired: list[tuple[Tensor, list[Any]]] = []
        self._stager = ThreadPoolExecutor(1, thread_name_prefix="polyattn-offload-stage")
        self._zero = self.stamp()

    def slot(self, nbytes: int) -> Tensor:
        self._drop_retired()
        with torch.inference_mode(False):  # whoever fills it later may be outside of it
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def use_readers(self, count: int) -> None:
        self._reader.use(count)

    def stream(self) -> Any:
        return self._module.current_stream(self.device)

    def fetch(self, source: Source, slot: Tensor, nbytes: int, users: Iterable[Any]) -> Fetch:
        for stream in users:  # at once: whatever is copied later comes after it too
            self._copies.wait_event(stream.record_event())
        filling = _Filling()
        copies = source.copies(slot)
        if copies:
            filling.copies = self._copy(copies)
        else:
            filling.reading = self._stager.submit(
                self._by_way_of_host, source, slot, nbytes, filling
            )
        return Fetch(nbytes, filling)

    def await_filled(self, fetch: Fetch) -> None:
        _, last = fetch.handle.events()
        self.stream().wait_event(last)
        fetch.awaited = True

    def finish(self, fetch: Fetch) -> None:
        fetch.handle.events()[1].synchronize()

    def copied(self, fetch: Fetch) -> tuple[float, float]:
        first, last = fetch.handle.events()
        read_s: float = fetch.handle.read_s
        return self.when(first) - read_s, read_s + self.seconds(first, last)

    def abandon(self, fetch: Fetch) -> None:
        fetch.handle.gate.shut()

    def retire(self, slot: Tensor, fetch: Fetch | None, users: Iterable[Any]) -> None:
        if fetch is not None:
            self.abandon(fetch)
        streams = [self._copies, *users]
        self._retired.append((slot, [stream.record_event() for stream in streams]))
        if slot.device.type != "cpu":  # who holds a view of it may let it go before they are done
            for stream in streams:
                slot.record_stream(stream)
        self._drop_retired()

    def wait_for(self, users: Iterable[Any]) -> None:
        for stream in users:
            stream.synchronize()

    def write_back(self, slot: Tensor, segments: Iterable[tuple[Tensor, int]]) -> None:
        for memory, offset in segments:
            memory.copy_(slot[offset : offset + memory.numel()])  # waits by itself

    def stamp(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self.stream())
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def when(self, stamp: Any) -> float:
        return self.seconds(self._zero, stamp)

    def drain(self) -> None:
        self._stager.submit(int).result()  # one thread: all before it is done
        self._module.synchronize(self.device)
        self._retired.clear()

    def close(self) -> None:
        self._stager.shutdown(wait=True, cancel_futures=True)
        self._reader.close()
        self._module.synchronize(self.device)
        self._retired.clear()
        self._staging.close()

    def _drop_retired(self) -> None:
        self._retired = [
            (slot, events)
            for slot, events in self._retired
            if not all(event.query() for event in events)
        ]

    def _copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> tuple[Any, Any]:
        first, last = (self._module.Event(enable_timing=True) for _ in range(2))
        with self._module.stream(self._copies):
            first.record(self._copies)
            for memory, slot in copies:
                slot.copy_(memory, non_blocking=True)
            last.record(self._copies)
        return first, last

    def _by_way_of_host(
        self, source: Source, slot: Tensor, nbytes: int, filling: _Filling
    ) -> tuple[Any, Any] | None:
        """Read a unit and queue its copy, unless it was given up meanwhile."""
        memory, events = self._staging.take(nbytes), None
        began = time.perf_counter()
        try:
            self._reader.read(source.reads(memory)).result()
            filling.read_s = time.perf_counter() - began
            events = filling.gate.through(lambda: self._copy([(memory, slot[:nbytes])]))
        finally:
            self._staging.give(None if events is None else events[1])
        return events
