"""A thread that makes records of what the device sent, so that the program need not wait for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Desk"]

_MOST = 20_000


class Desk:
    """Calls `work` with what it is given, in order, in a thread of its own.

    What waits is bounded: then whoever gives more waits. The first error of `work` is kept in
    `error`, and what comes after it is dropped.

    >>> seen = []
    >>> desk = Desk(seen.append)
    >>> desk.give(1), desk.give(2), desk.close(), seen
    (None, None, None, [1, 2])
    """

    def __init__(self, work: Callable[..., object]) -> None:
        self.error: Exception | None = None
        self._work = work
        self._given: queue.Queue[tuple[Any, ...] | threading.Event | None] = queue.Queue(_MOST)
        self._thread = threading.Thread(target=self._run, name="polyattn-jax-trace", daemon=True)
        self._thread.start()

    def give(self, *item: Any) -> None:
        """Have `work` called with this, soon."""
        self._given.put(item)

    def wait(self) -> None:
        """Until all is done that was given before."""
        if self._thread.is_alive():
            done = threading.Event()
            self._given.put(done)
            done.wait()

    def close(self) -> None:
        """Finish what was given, and end the thread."""
        self._given.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._given.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif self.error is None:
                try:
                    self._work(*item)
                except Exception as error:
                    self.error = error
