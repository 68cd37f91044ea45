"""Threads that take turns, by lot: what they do together is then said by a seed alone."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

__all__ = ["Turns"]


class Turns:
    """Of `count` threads one goes on at a time, until it passes the turn on.

    >>> import random, threading
    >>> turns, order = Turns(random.Random(0), 2), []
    >>> def body(number):
    ...     with turns.taken_by(number):
    ...         order.append(number)
    >>> threads = [threading.Thread(target=body, args=(number,)) for number in range(2)]
    >>> for thread in threads: thread.start()
    >>> for thread in threads: thread.join()
    >>> sorted(order)
    [0, 1]
    """

    def __init__(self, lot: random.Random, count: int) -> None:
        self._lot = lot
        self._changed = threading.Condition()
        self._there = list(range(count))
        self._turn = lot.randrange(count)
        self._me = threading.local()

    @contextlib.contextmanager
    def taken_by(self, number: int) -> Iterator[None]:
        """The scope of a thread, by its number: it waits for its turn, and leaves for good."""
        self._me.number = number
        with self._changed:
            self._changed.wait_for(lambda: self._turn == number)
        try:
            yield
        finally:
            with self._changed:
                self._there.remove(number)
                self._give()

    def pass_on(self) -> None:
        """Let some thread go on, this one or another."""
        number = self._me.number
        with self._changed:
            self._give()
            self._changed.wait_for(lambda: self._turn == number)

    def _give(self) -> None:
        if self._there:
            self._turn = self._lot.choice(self._there)
            self._changed.notify_all()
