"""How much memory this process holds on a device, now and at the most."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from functools import cache
from typing import Any

import torch

__all__ = ["begin_peak", "held", "peak", "trim"]


def held(device: torch.device) -> int:
    """Return the bytes that this process holds: resident memory, or what torch has allocated."""
    if device.type == "cpu":
        return _status("VmRSS") or _most_ever()
    return int(torch.get_device_module(device).memory_allocated(device))


def peak(device: torch.device) -> int:
    """Return the most that it has held since `begin_peak`, as far as the system tells."""
    if device.type == "cpu":
        return _status("VmHWM") or _most_ever()
    return int(torch.get_device_module(device).max_memory_allocated(device))


def begin_peak(device: torch.device) -> bool:
    """Let the peak begin at what is held now; False where it is that of the whole run."""
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:  # a container may forbid it
            return False
    return device.type != "cpu" or sys.platform == "linux"


def trim() -> None:
    """Have the C library give freed memory back to the system, where it can."""
    trim_heap = _heap_trimmer()
    if trim_heap is not None:
        trim_heap(0)


@cache
def _heap_trimmer() -> Any:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(ctypes.util.find_library("c")), "malloc_trim", None)


def _status(name: str) -> int:
    """Return a line of /proc/self/status in bytes, 0 where there is none."""
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            for line in lines:
                if line.startswith(name + ":"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def _most_ever() -> int:
    try:
        import resource
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most) * (1 if os.uname().sysname == "Darwin" else 1024)
