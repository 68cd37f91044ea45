"""Weights from host memory to an accelerator, by a stream of its own beside the computation's.

The slots' memory is allocated once. Every order between copy and computation is an event: a copy
waits for the computations that still read the slot, and computations wait for the copy. (CUDA;
written for any device whose torch module has streams and events. Never run on one so far.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from polyattn.hooks.layerwise_offload.devices.carrier import Carrier, Fetch
from polyattn.hooks.layerwise_offload.devices.host import Reader
from polyattn.hooks.layerwise_offload.exact_memory import Block, Lock
from polyattn.hooks.layerwise_offload.sources import Source

__all__ = ["AcceleratorCarrier"]


class AcceleratorCarrier(Carrier):
    """Copies by a stream; what lies in files goes by way of two locked blocks of host memory."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        if not self._module.is_available():
            from polyattn.errors import OffloadError

            raise OffloadError(
                f"got device={str(device)!r}, which is not here, expected one that is: "
                "'cpu' runs from files"
            )
        index = self._module.current_device() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self.locks_host = device.type == "cuda"
        self._copies = self._module.Stream(device=self.device)
        self._reader = Reader()
        self._staging: deque[tuple[Tensor, Any]] = deque()
        self._locks: list[Lock] = []
        self._stager = ThreadPoolExecutor(1, thread_name_prefix="polyattn-offload-stage")

    def slot(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def stream(self) -> Any:
        return self._module.current_stream(self.device)

    def fetch(self, source: Source, slot: Tensor, nbytes: int, users: Iterable[Any]) -> Fetch:
        after = [stream.record_event() for stream in users]
        fetch = Fetch(nbytes)
        fetch.began = time.perf_counter()
        copies = source.copies(slot)
        if copies:
            fetch.handle = self._copy(copies, after)
        else:
            fetch.handle = self._stager.submit(self._by_way_of_host, source, slot, nbytes, after)
        return fetch

    def await_filled(self, fetch: Fetch) -> float:
        began = time.perf_counter()
        first, last = self._events(fetch)
        self._module.current_stream(self.device).wait_event(last)
        if fetch.seconds is None and last.query():
            fetch.seconds = first.elapsed_time(last) / 1e3
        return time.perf_counter() - began

    def abandon(self, fetch: Fetch) -> None:
        """Copies keep their order in their stream: the next one comes after it by itself."""

    def write_back(self, slot: Tensor, segments: Iterable[tuple[Tensor, int]]) -> None:
        for memory, offset in segments:
            memory.copy_(slot[offset : offset + memory.numel()])  # waits by itself

    def stamp(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self.device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def drain(self) -> None:
        self._stager.submit(int).result()  # one thread: all before it is done
        self._module.synchronize(self.device)

    def close(self) -> None:
        self._stager.shutdown(wait=True, cancel_futures=True)
        self._reader.close()
        self._module.synchronize(self.device)
        for lock in self._locks:
            lock.release()
        self._staging.clear()

    @staticmethod
    def _events(fetch: Fetch) -> tuple[Any, Any]:
        if isinstance(fetch.handle, Future):
            fetch.handle = fetch.handle.result()
        first, last = fetch.handle
        return first, last

    def _copy(
        self, copies: Sequence[tuple[Tensor, Tensor]], after: Sequence[Any]
    ) -> tuple[Any, Any]:
        first, last = (self._module.Event(enable_timing=True) for _ in range(2))
        with self._module.stream(self._copies):
            for event in after:
                self._copies.wait_event(event)
            first.record(self._copies)
            for memory, slot in copies:
                slot.copy_(memory, non_blocking=True)
            last.record(self._copies)
        return first, last

    def _by_way_of_host(
        self, source: Source, slot: Tensor, nbytes: int, after: Sequence[Any]
    ) -> tuple[Any, Any]:
        memory = self._free_staging(nbytes)
        self._reader.read(source.reads(memory)).result()
        events = self._copy([(memory[:nbytes], slot[:nbytes])], after)
        self._staging.append((memory, events[1]))
        return events

    def _free_staging(self, nbytes: int) -> Tensor:
        """Return locked memory whose last copy is over."""
        if len(self._staging) == 2:
            memory, event = self._staging.popleft()
            event.synchronize()
            if memory.numel() >= nbytes:
                return memory
        memory = Block(nbytes).whole
        if self.locks_host:
            self._locks.append(Lock(memory))
        return memory
