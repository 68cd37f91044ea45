"""Weights from files into host memory, read ahead by threads while the processor computes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from polyattn.hooks.layerwise_offload.devices.carrier import Carrier, Fetch
from polyattn.hooks.layerwise_offload.exact_memory import Block
from polyattn.hooks.layerwise_offload.mapped import FilePart
from polyattn.hooks.layerwise_offload.sources import Source

__all__ = ["HostCarrier", "Reader", "Reading"]

_PIECE = 8 << 20
_MOST_THREADS = 4


class Reader:
    """Reads units from files in the order in which they are asked for."""

    def __init__(self) -> None:
        # each keeps a core from the computation while it copies what it has read
        self.threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def read(
        self,
        pieces: Iterable[tuple[FilePart, memoryview]],
        copies: Iterable[tuple[Tensor, Tensor]] = (),
    ) -> Reading:
        """Begin to read files into memory, and to copy memory."""
        times: list[float] = []
        parts = [
            self._submit(_read, times, part, start, memory[start : start + _PIECE])
            for part, memory in pieces
            for start in range(0, part.nbytes, _PIECE)
        ]
        parts += [self._submit(_copy, times, memory, slot) for memory, slot in copies]
        return Reading(times, parts)

    def use(self, threads: int) -> None:
        """Read by so many threads, after all that was asked for."""
        if threads == self.threads:
            return
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown(wait=True)
        self._pool, self.threads = None, threads

    def close(self) -> None:
        """End the threads after what they are reading now."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None

    def _submit(self, work: Any, *arguments: Any) -> Future[None]:
        if self._pool is None or self._process != os.getpid():  # a child has no threads
            self._process = os.getpid()
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="polyattn-offload")
        return self._pool.submit(work, *arguments)


class Reading:
    """What is being read, in parts."""

    def __init__(self, times: list[float], parts: list[Future[None]]) -> None:
        self._times = times
        self._parts = parts

    def result(self) -> tuple[float, float]:
        """Wait for it, raise what failed, return when it began and how long it took."""
        for part in self._parts:
            part.result()
        if not self._times:
            return time.perf_counter(), 0.0
        return min(self._times), max(self._times) - min(self._times)

    def give_up(self) -> None:
        """Begin no further part, and wait for those that have begun."""
        wait([part for part in self._parts if not part.cancel()])


def _read(times: list[float], part: FilePart, start: int, memory: memoryview) -> None:
    times.append(time.perf_counter())
    part.file.check()
    part.file.read(part.start + start, memory)
    part.file.check()  # what was written meanwhile may be in it
    times.append(time.perf_counter())


def _copy(times: list[float], source: Tensor, slot: Tensor) -> None:
    times.append(time.perf_counter())
    slot.copy_(source)
    times.append(time.perf_counter())


class HostCarrier(Carrier):
    """For models that compute on the processor: slots are host memory, filled from files."""

    device = torch.device("cpu")
    needs_files = True

    def __init__(self) -> None:
        self._reader = Reader()
        usual = self._reader.threads
        # a disk may be faster with more reads at once, which takes more from the computation
        self._choices = tuple(dict.fromkeys((usual, min(2 * usual, _MOST_THREADS))))

    @property
    def readers(self) -> tuple[int, ...]:
        return self._choices

    def use_readers(self, count: int) -> None:
        self._reader.use(count)

    def slot(self, nbytes: int) -> Tensor:
        return Block(nbytes).whole

    def stream(self) -> None:
        """Computations on the processor are done when they return."""

    def fetch(self, source: Source, slot: Tensor, nbytes: int, users: Iterable[Any]) -> Fetch:
        return Fetch(nbytes, self._reader.read(source.reads(slot), source.copies(slot)))

    def await_filled(self, fetch: Fetch) -> None:
        if not fetch.awaited:
            fetch.handle.result()
            fetch.awaited = True

    def finish(self, fetch: Fetch) -> None:
        """Who waited for it on the processor, waited for its end."""

    def copied(self, fetch: Fetch) -> tuple[float, float]:
        found: tuple[float, float] = fetch.handle.result()
        return found

    def abandon(self, fetch: Fetch) -> None:
        if not fetch.awaited:
            fetch.handle.give_up()

    def retire(self, slot: Tensor, fetch: Fetch | None, users: Iterable[Any]) -> None:
        if fetch is not None:
            self.abandon(fetch)

    def wait_for(self, users: Iterable[Any]) -> None:
        """Computations on the processor are done when they return."""

    def write_back(self, slot: Tensor, segments: Iterable[tuple[Tensor, int]]) -> None:
        for memory, offset in segments:
            memory.copy_(slot[offset : offset + memory.numel()])

    def stamp(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def when(self, stamp: float) -> float:
        return stamp

    def drain(self) -> None:
        """What was abandoned was waited for."""

    def close(self) -> None:
        self._reader.close()
