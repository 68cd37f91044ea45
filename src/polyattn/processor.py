"""What processor this is: part of what measured times are stored under, and of records."""

from __future__ import annotations

import functools
import os

__all__ = ["INSTRUCTION_SETS", "instruction_sets", "processor", "processors_usable"]

INSTRUCTION_SETS = (
    "avx", "avx2", "fma", "f16c", "bmi2", "avx_vnni", "avx512f", "avx512bw", "avx512dq",
    "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
    "amx_fp16", "neon", "bf16", "i8mm", "sve", "sve2", "sme",
)  # fmt: skip
"""The instruction sets that backends may ask for, of x86 and then of Arm, by Linux's names."""


@functools.lru_cache(maxsize=1)
def processor() -> tuple[str, frozenset[str]]:
    """Return the model's name and its instruction-set flags; no flags where none are told.

    >>> isinstance(processor()[0], str)
    True
    """
    import platform  # here: the import of polyattn, which takes the names below, stays as it was

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


def instruction_sets() -> frozenset[str] | None:
    """Return which of :data:`INSTRUCTION_SETS` this processor has; None where nothing tells.

    >>> (instruction_sets() or frozenset()) <= frozenset(INSTRUCTION_SETS)
    True
    """
    flags = processor()[1]
    if "asimd" in flags:  # what Linux calls Neon on 64-bit Arm
        flags |= {"neon"}
    return flags & frozenset(INSTRUCTION_SETS) if flags else None


def processors_usable() -> int:
    """Return how many processors this process may run on, at least 1.

    >>> processors_usable() >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
