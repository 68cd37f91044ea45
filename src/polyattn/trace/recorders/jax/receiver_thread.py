"""A thread that makes records of what devices sent, so that the program need not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["Desk", "Source"]

_MOST_S = 0.5
"""A wait for more; the end is heard at once."""


class Source(Protocol):
    """Where what was sent waits: :class:`polyattn._native.TraceTaps`, or one in Python."""

    told: int
    """How many were sent so far."""

    def tell(self, place: int, rank: int, numbers: bytes) -> None:
        """Have this sent, too; while there is no room, wait."""

    def take(self, seconds: float) -> Sequence[tuple[int, int, bytes]]:
        """Return all that waits, after waiting for some that long."""

    def end(self) -> None:
        """Take nothing more; what waits can still be taken."""


class Desk:
    """Calls `work` with what came from `source`, in order, in a thread of its own.

    The first error of `work` is kept in `error`, and what comes after it is dropped.
    """

    def __init__(
        self, source: Source, work: Callable[[Sequence[tuple[int, int, bytes]]], object]
    ) -> None:
        self.error: Exception | None = None
        self._source, self._work = source, work
        self._done, self._ended = 0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="polyattn-jax-trace", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until all is done that was sent before."""
        told = self._source.told
        with self._changed:
            while self._done < told and self._thread.is_alive():
                self._changed.wait(_MOST_S)

    def close(self) -> None:
        """Finish what was sent, and end the thread."""
        self._ended = True
        self._source.end()
        self._thread.join()

    def _run(self) -> None:
        while True:
            ended = self._ended  # before what is taken: after it nothing more comes
            found = self._source.take(_MOST_S)
            if found and self.error is None:
                try:
                    self._work(found)
                except Exception as error:
                    self.error = error
            if found:
                with self._changed:
                    self._done += len(found)
                    self._changed.notify_all()
            elif ended:
                return
