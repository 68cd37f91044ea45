"""When cached choices may be wrong: a setting, a backend or a measured time has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from polyattn.forks import kept_free

__all__ = ["invalidate", "listeners", "lock"]

lock = kept_free(threading.RLock())
listeners: list[Callable[[], None]] = []
"""What is called then, in order: the first gives the new epoch its name."""


def invalidate() -> None:
    """Forget every cached choice: a backend, a setting or a measured time has changed."""
    with lock:
        for forget in listeners:
            forget()
