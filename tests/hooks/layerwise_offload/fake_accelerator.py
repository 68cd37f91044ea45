"""What torch has for a device, over host memory: streams that do at once what they are told to.

The order between the thread that reads files and whoever copies directly is then the real one.
"""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from polyattn.hooks.layerwise_offload.devices import accelerator
from polyattn.hooks.layerwise_offload.devices.accelerator import AcceleratorCarrier


class Event:
    pending: ClassVar[set[int]] = set()  # devices whose events have not come

    def __init__(self, enable_timing: bool = False) -> None:
        self.time, self.device = 0.0, 0

    def record(self, stream: Stream) -> None:
        self.time, self.device = time.perf_counter(), stream.device

    def query(self) -> bool:
        return self.device not in self.pending

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return (other.time - self.time) * 1e3


class Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.device = 0 if device is None else device.index

    def wait_event(self, event: Event) -> None:
        assert event.device == self.device

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass


class Module(SimpleNamespace):
    Event, Stream = Event, Stream

    def __init__(self) -> None:
        self.current = [Stream(torch.device("cuda", index)) for index in range(2)]

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.current)

    def current_device(self) -> int:
        return 0

    def stream(self, stream: Stream) -> Any:
        return contextlib.nullcontext()

    def current_stream(self, device: torch.device) -> Stream:
        return self.current[device.index or 0]

    def synchronize(self, device: torch.device) -> None:
        pass


class OverHostMemory(AcceleratorCarrier):
    """The real carrier of accelerators, whose slots are host memory."""

    def __init__(self, index: int = 0, *, locks_host: bool = False) -> None:
        super().__init__(torch.device("cuda", index))
        self.index, self.locks_host = index, locks_host
        self._staging._locked = locks_host
        self.device = torch.device("cpu")

    def stream(self) -> Any:
        return self._module.current_stream(torch.device("cuda", getattr(self, "index", 0)))


class Runtime:
    """Of CUDA, what locks memory: which addresses, and how much."""

    def __init__(self, most: int = 1 << 62) -> None:
        self.locked: dict[int, int] = {}
        self.most = self.peak = 0
        self.most = most

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if nbytes + sum(self.locked.values()) > self.most:
            return 2
        assert address not in self.locked
        self.locked[address] = nbytes
        self.peak = max(self.peak, sum(self.locked.values()))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Module:
    module = Module()
    monkeypatch.setattr(accelerator.torch, "get_device_module", lambda device=None: module)
    monkeypatch.setattr(Event, "pending", set())
    return module


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made
