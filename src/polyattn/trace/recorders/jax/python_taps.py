"""What a trace hears where there is no native code: the same, in Python."""

from __future__ import annotations

import threading
from collections import deque

__all__ = ["PythonTaps"]


class PythonTaps:
    """What waits for the thread that makes records; bounded, then whoever tells more waits.

    >>> taps = PythonTaps(most=2)
    >>> taps.tell(0, -1, b"numbers")
    >>> taps.take(0.0), taps.told
    ([(0, -1, b'numbers')], 1)
    """

    def __init__(self, most: int) -> None:
        self.told = 0
        self._most = most
        self._waiting: deque[tuple[int, int, bytes]] = deque()
        self._ended = False
        self._changed = threading.Condition()

    def tell(self, place: int, rank: int, numbers: bytes) -> None:
        """Have this taken; what comes after the end is dropped."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._waiting) < self._most)
            if not self._ended:
                self._waiting.append((place, rank, numbers))
                self.told += 1
                self._changed.notify_all()

    def take(self, seconds: float) -> list[tuple[int, int, bytes]]:
        """Return all that waits, after waiting for some that long."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or bool(self._waiting), seconds)
            found = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        return found

    def end(self) -> None:
        """Take nothing more; what waits can still be taken."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
