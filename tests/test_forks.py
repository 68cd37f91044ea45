"""A forked child never waits for a thread that is not in it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from polyattn import epoch, forks
from polyattn.forks import kept_free
from polyattn.native import forms
from polyattn.selection import prepare
from polyattn.selection.registry import registry
from polyattn.tuning import lookup, storage

if not hasattr(os, "fork"):
    pytest.skip("no fork on this system", allow_module_level=True)


@pytest.fixture
def lock() -> Iterator[threading.Lock]:
    made = kept_free(threading.Lock())
    yield made
    forks._locks.remove(made)


def in_child(does: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if does() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def held(lock: Any, until: Callable[[], object]) -> threading.Thread:
    """Start a thread that holds a lock, and return when it does."""
    holds = threading.Event()

    def hold() -> None:
        with lock:
            holds.set()
            until()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert holds.wait(10)
    return thread


def free(lock: Any) -> bool:
    if found := bool(lock.acquire(timeout=0.5)):
        lock.release()
    return found


def _is_mine(lock: Any) -> bool:
    return bool(lock._is_owned())


@pytest.mark.parametrize(
    "one",
    [epoch.lock, registry.lock, lookup._lock, forms._lock, storage._PROCESS_LOCK, prepare._loading],
)
def test_the_librarys_locks_are_free_in_a_child(one: Any) -> None:
    thread = held(one, lambda: time.sleep(0.1))
    assert in_child(lambda: free(one))
    thread.join()
    assert free(one)


def test_a_holder_that_wants_another_lock_is_no_deadlock(lock: threading.Lock) -> None:
    def wants_the_first() -> None:
        time.sleep(0.1)  # the fork has tried by then
        with epoch.lock:
            pass

    thread = held(lock, wants_the_first)
    assert in_child(lambda: free(lock) and free(epoch.lock))
    thread.join()


def test_a_lock_that_does_not_come_is_free_in_the_child(
    lock: threading.Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "_WAIT_S", 0.1)
    goes_on = threading.Event()
    thread = held(lock, goes_on.wait)
    with epoch.lock:  # who forks keeps what it holds
        assert in_child(lambda: free(lock) and _is_mine(epoch.lock))
    assert not free(lock)
    goes_on.set()
    thread.join()
    assert free(lock) and free(epoch.lock)
