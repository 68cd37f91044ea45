"""The gate between a unit that was read from files and its slot, which others may want."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Gate"]

_T = TypeVar("_T")


class Gate:
    """Lets the copies of one filling through to the device's stream, unless it was shut before.

    Reading takes a thread of its own, and a filling that is asked for later may reach the stream
    earlier. What was given up must not come after it.

    >>> from polyattn.hooks.layerwise_offload.devices.gate import Gate
    >>> gate = Gate()
    >>> gate.through(lambda: "copied"), gate.shut(), gate.through(lambda: "copied")
    ('copied', None, None)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_shut = False

    def shut(self) -> None:
        """Let nothing through from now on; what went through before is in its stream, in order."""
        with self._lock:
            self._is_shut = True

    def through(self, copies: Callable[[], _T]) -> _T | None:
        """Have the copies queued, and return what that returns; None if the gate is shut."""
        with self._lock:
            return None if self._is_shut else copies()
