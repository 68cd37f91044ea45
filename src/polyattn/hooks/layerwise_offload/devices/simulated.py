"""A device that is host memory and a virtual clock: every order that a real one may choose, by lot.

Copies and computations are queued on two streams, as on a GPU, and run later: whichever is next in
its stream and whose events have come may go, in random order, a copy in two halves. What reads a
slot too early or too late reads wrong bytes, so that no schedule may be wrong for all to be right.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyattn.hooks.layerwise_offload.devices.carrier import Carrier, Fetch
from polyattn.hooks.layerwise_offload.exact_memory import Block
from polyattn.hooks.layerwise_offload.sources import Source

__all__ = ["SimulatedCarrier"]

COPIES, COMPUTE = "copies", "compute"


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


@dataclass
class _Stream:
    queue: deque[_Operation] = field(default_factory=deque)
    now: float = 0.0


class SimulatedCarrier(Carrier):
    """Runs what is queued in random order (`seed`), or None: each operation as soon as it may.

    `rate`: bytes a virtual second. `launch` queues a computation, as a module's forward does on a
    GPU; `synchronize` runs all that is left.
    """

    device = torch.device("cpu")

    def __init__(self, seed: int | None = 0, rate: float = 1e9) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._rate = rate
        self._streams = {COPIES: _Stream(), COMPUTE: _Stream()}
        self.slots_bytes = 0

    def slot(self, nbytes: int) -> Tensor:
        self.slots_bytes += nbytes
        return Block(nbytes).whole.fill_(0xA5)

    def stream(self) -> str:
        return COMPUTE

    def fetch(self, source: Source, slot: Tensor, nbytes: int, users: Iterable[str]) -> Fetch:
        after = [self._record(user) for user in users]
        halves = [(to, given, part) for given, to in source.copies(slot) for part in (0, 1)]
        for index, (to, given, part) in enumerate(halves):
            half = given.numel() // 2
            span = slice(0, half) if part == 0 else slice(half, None)
            # by address, as a device copies: nobody holds the slot meanwhile
            work = _copier(given[span], to[span].data_ptr())
            waits = after if index == 0 else []
            self._queue(COPIES, waits, work, given[span].numel() / self._rate)
        return Fetch(nbytes, self._record(COPIES))

    def await_filled(self, fetch: Fetch) -> float:
        self._queue(COMPUTE, [fetch.handle], _nothing, 0.0)
        return 0.0

    def abandon(self, fetch: Fetch) -> None:
        """Copies keep their order in their stream."""

    def write_back(self, slot: Tensor, segments: Iterable[tuple[Tensor, int]]) -> None:
        self.synchronize()
        for memory, offset in segments:
            memory.copy_(slot[offset : offset + memory.numel()])

    def launch(self, work: Callable[[], None], seconds: float = 1e-3) -> None:
        """Queue a computation."""
        self._queue(COMPUTE, [], work, seconds)

    def synchronize(self) -> float:
        """Run all that is queued, and return the virtual time at which it was done."""
        while self._step():
            pass
        return max(stream.now for stream in self._streams.values())

    def stamp(self) -> _Event:
        return self._record(COMPUTE)

    def seconds(self, begin: _Event, end: _Event) -> float:
        if end.time is None:
            self.synchronize()
        return (end.time or 0.0) - (begin.time or 0.0)

    def drain(self) -> None:
        self.synchronize()

    def close(self) -> None:
        self.synchronize()

    def _record(self, name: str) -> _Event:
        event = _Event()
        self._queue(name, [], _nothing, 0.0, event)
        return event

    def _queue(
        self, name: str, after: list[_Event], work: Callable[[], None], seconds: float,
        event: _Event | None = None,
    ) -> None:  # fmt: skip
        self._streams[name].queue.append(_Operation(after, work, seconds, event))
        if self._random is not None:
            for _ in range(self._random.randrange(3)):
                self._step()

    def _step(self) -> bool:
        """Run one operation that may run; False if there is none."""
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
    import ctypes

    def copy() -> None:
        ctypes.memmove(address, given.data_ptr(), given.numel())

    return copy
