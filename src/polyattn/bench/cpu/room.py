"""Whether the machine's memory holds what a case needs: the longest caches are gigabytes.

What is needed is a multiple of the keys and values in float32, measured as the most that a process
held, with room to spare: a run that is killed for its memory says nothing.
"""

from __future__ import annotations

import math

from polyattn.bench.cpu.cases import Case

__all__ = ["free_bytes", "is_large", "lacking", "need_bytes"]

OURS = 5.0
"""Multiples that this process takes: keys and values as they are, in pages, as codes of two kinds,
and what the codes stand for while they are checked. Measured: 4.8 with eight sequences."""
ENGINE = 3.5
"""Multiples that an engine takes: what it is given, its own form of it, and what it works with.

At most 3.3 with the engines of ``benchmarks/peers`` at 32,768 keys (JAX; OpenVINO 3.2)."""
EVERY_HEAD = 2.7
"""Multiples of one copy for each query head that torch's math path takes."""
_BASE = 1 << 30  # the libraries, and the memory that the read rate is measured on
_FEW = 1 << 28  # of which no multiple matters


def need_bytes(case: Case, times: float) -> float:
    """Return what `times` the keys and values take in float32, with a process around them.

    >>> from polyattn.bench.cpu.cases import Size
    >>> round(need_bytes(Case("decode", Size(8, 32, 8, 1, 32768, 128)), 1) / 2**30, 1)
    3.0
    """
    s = case.size
    return _BASE + times * 8 * s.batch * s.kv_heads * s.kv_len * s.head_dim


def is_large(case: Case, times: float = 1.0) -> bool:
    """Return whether so many multiples of the keys and values are a large part of the memory.

    Such cases are warmed before each block (``Step.warm``). On a virtual machine the first call
    after another process had got and freed gigabytes took 245 to 325 ms, all of it processor time
    of its own, and the next one 85, whichever way came first. The host that makes its entries for
    the guest's pages anew would explain it; a loop of decoding steps does not meet it.
    """
    return need_bytes(case, times) - _BASE >= _FEW


def lacking(case: Case, times: float, free: float | None = None) -> str:
    """Return what is lacking for so many multiples, "" where nothing is; `free`: bytes left."""
    needed = need_bytes(case, times)
    if not is_large(case, times):
        return ""
    left = free_bytes() if free is None else free
    return "" if needed <= left else f"needs about {_gib(needed)}, and {_gib(left)} are free"


def _gib(size: float) -> str:
    return f"{max(size, 0.0) / 2**30:.1f} GiB"


def free_bytes() -> float:
    """Return the memory that the system and the container have left; infinite if nothing tells."""
    return min(_of_system(), _of_container())


def _of_system() -> float:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            line = next(one for one in lines if one.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024.0
    except (OSError, StopIteration, ValueError):  # not Linux
        return math.inf


def _of_container() -> float:
    """Return what the container may still take; files that it has read can be dropped again."""
    folder = "/sys/fs/cgroup"
    try:
        with open(f"{folder}/memory.max", encoding="ascii") as most:
            granted = int(most.read())
        with open(f"{folder}/memory.current", encoding="ascii") as now:
            taken = int(now.read())
        with open(f"{folder}/memory.stat", encoding="ascii") as lines:
            files = next(int(x.split()[1]) for x in lines if x.startswith("inactive_file "))
        return float(granted - taken + files)
    except (OSError, StopIteration, ValueError):  # none, or "max"
        return math.inf
