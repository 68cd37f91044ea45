"""Rows of statistics on each device, and how they come to the host: once, behind the program.

A buffer is filled by the program's thread, then sent: on a CUDA device its copy is queued behind
the forward on the same stream and only the writing thread waits for it. After it was read it is
used again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyattn.trace.recorders.torch.tensor_statistics import (
    WIDTH,
    RowWriter,
    instruction_set,
    new_buffer,
)

__all__ = ["RowPool", "Rows"]

_ON_CPU, _ON_DEVICE = 256, 1024
"""Rows of one buffer: 170 kB, and 700 kB."""


class Rows:
    """One buffer that is being filled; `used` rows of it are.

    `first`: the address of its first row. `isa`: the instruction set of the kernel that fills it.
    """

    __slots__ = ("_host", "_ready", "buffer", "device", "first", "isa", "size", "used", "write")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = _ON_CPU if device.type == "cpu" else _ON_DEVICE
        with torch.inference_mode(False):
            self.buffer = new_buffer(self.size, device)
        self.write = RowWriter(self.buffer).write
        self.first, self.isa = self.buffer.data_ptr(), -1
        self.used = 0
        self._host: Tensor | None = None
        self._ready: Any = None

    def send(self) -> None:
        """Begin to bring what was written to the host; waits for nothing on CPU and CUDA."""
        if self.device.type == "cuda" and self.used:
            with torch.inference_mode(False), torch.cuda.device(self.device):
                if self._host is None:
                    self._host = torch.empty(self.size, WIDTH, dtype=self.buffer.dtype).pin_memory()
                self._host[: self.used].copy_(self.buffer[: self.used], non_blocking=True)
                self._ready = torch.cuda.Event()
                self._ready.record()

    def numbers(self) -> NDArray[np.float64]:
        """Return the rows; waits for the device."""
        if self._ready is not None:
            self._ready.synchronize()
            self._ready = None
        host = self.buffer if self._host is None else self._host
        found: NDArray[np.float64] = host[: self.used].detach().cpu().numpy()
        return found.astype(np.float64, copy=False)


class RowPool:
    """Buffers to use again. Bounded: there are never more than wait for the writer at one time."""

    def __init__(self) -> None:
        self._free: dict[torch.device, deque[Rows]] = {}

    def take(self, device: torch.device) -> Rows:
        """Return an empty buffer on the device."""
        try:
            rows = self._free[device].popleft()
        except (KeyError, IndexError):
            rows = Rows(device)
        rows.isa = instruction_set()
        return rows

    def give(self, rows: Rows) -> None:
        """Take a buffer back whose numbers were read."""
        rows.used = 0
        self._free.setdefault(rows.device, deque(maxlen=4)).append(rows)
