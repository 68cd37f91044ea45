"""Locks that nobody holds in a forked child.

A child of `fork` has one thread. A lock that another thread of its parent held would be held in it
for ever, and what that thread was changing would be half done. So `fork` waits until each lock that
is handed to :func:`kept_free` is free, and holds them all meanwhile. It waits for so long and no
longer: where a lock does not come, the child gets it free in any case.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, TypeVar

__all__ = ["kept_free"]

Lock = TypeVar("Lock")

_WAIT_S = 60.0
_locks: list[Any] = []


class _Here(threading.local):
    """What this thread, which forks, has taken."""

    def __init__(self) -> None:
        self.taken: list[Any] = []


_here = _Here()


def kept_free(lock: Lock) -> Lock:
    """Return the lock, a ``Lock`` or ``RLock`` of a process's whole life, free in every child.

    >>> lock = kept_free(threading.Lock())
    >>> with lock:
    ...     lock in _locks
    True
    >>> _locks.remove(lock)
    """
    _locks.append(lock)
    return lock


def _take() -> None:
    """Take all locks; where one is held, wait for it with none in hand, for its holder may want it.

    Whoever forks from within one of them may wait for a thread that waits for that: not for ever.
    """
    until = time.monotonic() + _WAIT_S
    first = None
    while (left := until - time.monotonic()) > 0:
        _give_back()
        if first is not None:
            if not first.acquire(timeout=left):
                return
            _here.taken.append(first)
        locks = [lock for lock in tuple(_locks) if lock is not first]
        first = next((lock for lock in locks if not _has_taken(lock)), None)
        if first is None:
            return


def _has_taken(lock: Any) -> bool:
    if lock.acquire(blocking=False):
        _here.taken.append(lock)
        return True
    return False


def _give_back() -> None:
    while _here.taken:
        _here.taken.pop().release()


def _free_all() -> None:
    """In the child: also those that did not come, whose holders are not here."""
    taken = set(map(id, _here.taken))
    _give_back()
    for lock in _locks:
        is_owned = getattr(lock, "_is_owned", None)  # by who forks from within it: an RLock's
        if id(lock) not in taken and not (is_owned and is_owned()):
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_take, after_in_parent=_give_back, after_in_child=_free_all)
