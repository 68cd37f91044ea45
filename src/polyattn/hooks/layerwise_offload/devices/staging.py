"""Two blocks of locked host memory, by way of which weights go from files to a device."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from polyattn.hooks.layerwise_offload.exact_memory import Block, Lock

__all__ = ["Staging"]

_BLOCKS = 2


class _Staged:
    """A block, and what still copies from it."""

    def __init__(self, nbytes: int, locked: bool) -> None:
        self.memory = Block(nbytes).whole
        self.lock = Lock(self.memory) if locked and nbytes else None
        self.event: Any = None

    def free(self) -> None:
        if self.event is not None:
            self.event.synchronize()
            self.event = None

    def release(self) -> None:
        self.free()
        if self.lock is not None:
            self.lock.release()


class Staging:
    """Blocks in turn: while one is copied to the device, the other is read into."""

    def __init__(self, *, locked: bool) -> None:
        self._locked = locked
        self._blocks: deque[_Staged] = deque()
        self._taken: _Staged | None = None

    def take(self, nbytes: int) -> Tensor:
        """Return memory for a unit from which nothing is copied any more, until `give`."""
        staged = None
        if len(self._blocks) == _BLOCKS:
            staged = self._blocks.popleft()
            staged.free()
            if staged.memory.numel() < nbytes:
                staged.release()
                staged = None
        self._taken = _Staged(nbytes, self._locked) if staged is None else staged
        return self._taken.memory[:nbytes]

    def give(self, event: Any) -> None:
        """Put it back; `event` comes when its copy is over, None: there is none."""
        if self._taken is not None:
            self._taken.event = event
            self._blocks.append(self._taken)
            self._taken = None

    def close(self) -> None:
        """Wait for the copies, and unlock the memory."""
        while self._blocks:
            self._blocks.popleft().release()
