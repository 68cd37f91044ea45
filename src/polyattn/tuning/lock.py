"""A lock between processes that the kernel gives back when its holder dies."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _try_lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def file_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock file at `path`; TimeoutError if another process holds it for `timeout_s`.

    The file stays where it is: removing it would let two processes lock two files of one name.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _wait(descriptor, path, time.monotonic() + timeout_s)
        yield
    finally:
        os.close(descriptor)


def _wait(descriptor: int, path: Path, deadline: float) -> None:
    while True:
        try:
            return _try_lock(descriptor)
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{path} is held by another process") from None
        time.sleep(random.uniform(0.001, 0.005))
