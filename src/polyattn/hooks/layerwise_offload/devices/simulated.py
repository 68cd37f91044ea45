"""A device that is host memory and a virtual clock: every order that a real one may choose, by lot.

Copies, computations and the reading of files are queued on streams, as on a GPU, and run later:
whichever is next in its stream and whose events have come may go, in random order, a copy in two
halves. What reads a slot too early or too late reads wrong bytes, and memory that is given back
while something still touches it is a fault, so that no schedule may be wrong for all to be right.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from polyattn.hooks.layerwise_offload.devices.carrier import Carrier, Fetch
from polyattn.hooks.layerwise_offload.devices.gate import Gate
from polyattn.hooks.layerwise_offload.sources import Source

__all__ = ["SimulatedCarrier"]

COPIES, READING, COMPUTE = "copies", "reading", "compute"
_NEW, _GONE = 0xA5, 0xEE  # what memory holds before it is filled, and after it was given back


@dataclass(eq=False)
class _Event:
    """A point in a stream; `time` is when it came, in virtual seconds."""

    time: float | None = None


@dataclass
class _Operation:
    after: list[_Event]
    work: Callable[[], None]
    seconds: float
    event: _Event | None = None
    touches: int | None = None  # an address within the memory that it reads or writes


@dataclass
class _Stream:
    queue: deque[_Operation] = field(default_factory=deque)
    now: float = 0.0


class _Filling:
    """One filling: its gate, and the events around its copies once they are in their stream."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.first, self.last = _Event(), _Event()
        self.is_queued = False


class SimulatedCarrier(Carrier):
    """Runs what is queued in random order (`seed`), or None: each operation as soon as it may.

    `rate`: bytes a virtual second, of copies and of reading. `launch` queues a computation, as a
    module's forward does on a GPU, on the stream of its thread (`use_stream`); `synchronize` runs
    all that is left. `faults`: what touched memory that was given back.
    """

    device = torch.device("cpu")

    def __init__(self, seed: int | None = 0, rate: float = 1e9) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._rate = rate
        self._streams = {COPIES: _Stream(), READING: _Stream(), COMPUTE: _Stream()}
        self._chosen = threading.local()
        self._lock = threading.RLock()
        self._retired: list[tuple[Tensor, list[_Event]]] = []
        self._gone: list[np.ndarray] = []
        self.slots_bytes = 0
        self.faults: list[str] = []

    # -- memory -----------------------------------------------------------------------------------

    def slot(self, nbytes: int) -> Tensor:
        self._drop_retired()
        self.slots_bytes += nbytes
        memory = np.full(max(nbytes, 1), _NEW, np.uint8)
        handed = memory[:]
        gone = weakref.finalize(handed, self._given_back, memory)
        gone.atexit = False
        with torch.inference_mode(False):  # whoever fills it later may be outside of it
            if not nbytes:
                return torch.empty(0, dtype=torch.uint8)
            return torch.frombuffer(handed, dtype=torch.uint8, count=nbytes)

    def _given_back(self, memory: np.ndarray) -> None:
        with self._lock:
            start = memory.ctypes.data
            for name, stream in self._streams.items():
                for each in stream.queue:
                    if each.touches is not None and start <= each.touches < start + len(memory):
                        self.faults.append(f"{len(memory)} bytes went that {name} still touches")
            memory.fill(_GONE)
            self._gone.append(memory)  # what is queued still may touch it, and must not crash

    def retire(self, slot: Tensor, fetch: Fetch | None, users: Iterable[str]) -> None:
        if fetch is not None:
            self.abandon(fetch)
        self._retired.append((slot, [self._record(name) for name in (COPIES, *sorted(users))]))

    def _drop_retired(self) -> None:
        self._retired = [
            (slot, events)
            for slot, events in self._retired
            if any(event.time is None for event in events)
        ]

    # -- streams ----------------------------------------------------------------------------------

    def stream(self) -> str:
        name: str = getattr(self._chosen, "name", COMPUTE)
        return name

    def use_stream(self, name: str, after: Iterable[str] = ()) -> None:
        """Have this thread compute on a stream of that name, from what others do by now on."""
        with self._lock:
            self._streams.setdefault(name, _Stream())
            self._chosen.name = name
            self._queue(name, [self._record(other) for other in after])

    def fetch(self, source: Source, slot: Tensor, nbytes: int, users: Iterable[str]) -> Fetch:
        self._queue(COPIES, [self._record(user) for user in sorted(users)])  # a seed says all
        filling = _Filling()
        copies = source.copies(slot)
        if copies:
            self._queue(COPIES, work=lambda: self._must_be_open(source))
            self._copy([(given, to.data_ptr()) for given, to in copies], filling)
            self._queue(COPIES, work=lambda: self._must_be_open(source))
        else:
            self._read(source, slot.data_ptr(), nbytes, filling)
        return Fetch(nbytes, filling)

    def _read(self, source: Source, address: int, nbytes: int, filling: _Filling) -> None:
        """As a thread does: when a unit was read, its copy is queued, unless it was given up."""
        staged, was_read = torch.empty(nbytes, dtype=torch.uint8), _Event()

        def work() -> None:
            self._must_be_open(source)
            for part, memory in source.reads(staged):
                part.file.read(part.start, memory)
                part.file.check()
            filling.gate.through(lambda: self._copy([(staged, address)], filling, was_read))

        self._queue(READING, work=work, seconds=nbytes / self._rate, event=was_read)

    def _must_be_open(self, source: Source) -> None:
        if source.is_closed:
            self.faults.append("a home went that is still copied from")

    def _copy(self, copies: list[tuple[Tensor, int]], filling: _Filling, *after: _Event) -> None:
        self._queue(COPIES, after, event=filling.first)
        for given, address in copies:
            half = given.numel() // 2
            for part, to in ((given[:half], address), (given[half:], address + half)):
                # by address, as a device copies: nobody holds the slot meanwhile
                seconds = part.numel() / self._rate
                self._queue(COPIES, work=_copier(part, to), seconds=seconds, touches=to)
        self._queue(COPIES, event=filling.last)
        filling.is_queued = True

    def await_filled(self, fetch: Fetch) -> None:
        while not fetch.handle.is_queued and self._step():
            pass  # the host stands until it was read
        self._queue(self.stream(), [fetch.handle.last])
        fetch.awaited = True

    def finish(self, fetch: Fetch) -> None:
        while fetch.handle.last.time is None and self._step():
            pass

    def copied(self, fetch: Fetch) -> tuple[float, float]:
        first, last = fetch.handle.first, fetch.handle.last
        return self.when(first), self.seconds(first, last)

    def abandon(self, fetch: Fetch) -> None:
        fetch.handle.gate.shut()

    def wait_for(self, users: Iterable[str]) -> None:
        events = [self._record(user) for user in sorted(users)]
        while any(event.time is None for event in events) and self._step():
            pass

    def write_back(self, slot: Tensor, segments: Iterable[tuple[Tensor, int]]) -> None:
        for memory, offset in segments:
            memory.copy_(slot[offset : offset + memory.numel()])

    def launch(
        self, work: Callable[[], None], seconds: float = 1e-3, touches: int | None = None
    ) -> None:
        """Queue a computation that reads, or writes, the memory at an address."""
        self._queue(self.stream(), work=work, seconds=seconds, touches=touches)

    def synchronize(self) -> float:
        """Run all that is queued, and return the virtual time at which it was done."""
        while self._step():
            pass
        return max(stream.now for stream in self._streams.values())

    def stamp(self) -> _Event:
        return self._record(self.stream())

    def seconds(self, begin: _Event, end: _Event) -> float:
        return self.when(end) - self.when(begin)

    def when(self, stamp: _Event) -> float:
        if stamp.time is None:
            self.synchronize()
        return stamp.time or 0.0

    def drain(self) -> None:
        self.synchronize()
        self._drop_retired()

    def close(self) -> None:
        self.drain()

    def _record(self, name: str) -> _Event:
        event = _Event()
        self._queue(name, event=event)
        return event

    def _queue(
        self, name: str, after: Iterable[_Event] = (), work: Callable[[], None] | None = None,
        seconds: float = 0.0, event: _Event | None = None, touches: int | None = None,
    ) -> None:  # fmt: skip
        with self._lock:
            operation = _Operation(list(after), work or _nothing, seconds, event, touches)
            self._streams[name].queue.append(operation)
            if self._random is not None:
                for _ in range(self._random.randrange(3)):
                    self._step()

    def _step(self) -> bool:
        """Run one operation that may run; False if there is none."""
        with self._lock:
            ready = [
                stream
                for stream in self._streams.values()
                if stream.queue and all(event.time is not None for event in stream.queue[0].after)
            ]
            if not ready:
                return False
            stream = ready[0] if self._random is None else self._random.choice(ready)
            operation = stream.queue.popleft()
            stream.now = max(stream.now, *(event.time or 0.0 for event in operation.after), 0.0)
            operation.work()
            stream.now += operation.seconds
            if operation.event is not None:
                operation.event.time = stream.now
            return True


def _nothing() -> None:
    return None


def _copier(given: Tensor, address: int) -> Callable[[], None]:
    def copy() -> None:
        ctypes.memmove(address, given.data_ptr(), given.numel())

    return copy
