"""What processor this is: part of what measured times are stored under, and of records."""

from __future__ import annotations

import functools
import os
import platform

__all__ = ["processor", "processors_usable"]


@functools.lru_cache(maxsize=1)
def processor() -> tuple[str, frozenset[str]]:
    """Return the model's name and its instruction-set flags; no flags where none are told.

    >>> isinstance(processor()[0], str)
    True
    """
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                found.setdefault(name.strip(), value.strip())
    except OSError:  # not Linux: the platform module knows the name at least
        found = {}
    model = found.get("model name") or platform.processor() or platform.machine()
    return model, frozenset((found.get("flags") or found.get("Features") or "").split())


def processors_usable() -> int:
    """Return how many processors this process may run on, at least 1.

    >>> processors_usable() >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
