"""What processor this is: part of what measured times are stored under, and of records."""

from __future__ import annotations

import errno
import functools
import os
import re
import sys
from typing import NamedTuple

__all__ = [
    "INSTRUCTION_SETS", "Identity", "identity", "instruction_sets", "level_of", "processor",
    "processors_quota", "processors_usable",
]  # fmt: skip

INSTRUCTION_SETS = (
    "avx", "avx2", "fma", "f16c", "bmi2", "avx_vnni", "avx512f", "avx512bw", "avx512dq",
    "avx512vl", "avx512_vnni", "avx512vbmi", "avx512_bf16", "avx512_fp16", "amx_tile",
    "amx_bf16", "amx_int8", "amx_fp16", "neon", "bf16", "i8mm", "sve", "sve2", "sme",
)  # fmt: skip
"""The instruction sets that backends may ask for, of x86 and then of Arm, by Linux's names."""

_LEVELS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve", "neon")
_NAMES = {"amx_bf16": "amx", "avx512_bf16": "avx512bf16", "avx512f": "avx512"}


class Identity(NamedTuple):
    """Who made the processor, and which it is; None where nothing tells.

    `family`: of x86 the family, of Arm the part number of the core.
    """

    vendor: str | None = None
    family: int | None = None
    model: int | None = None
    stepping: int | None = None

    def __str__(self) -> str:
        told = (("family", self.family), ("model", self.model), ("stepping", self.stepping))
        parts = (f"{name} {value}" for name, value in told if value is not None)
        return " ".join((self.vendor or "vendor unknown", *parts))


@functools.lru_cache(maxsize=1)
def _told() -> dict[str, str]:
    """Return what Linux tells of the first processor; nothing elsewhere."""
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                found.setdefault(name.strip(), value.strip())
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # of this moment; the answer is kept
            raise
        return {}  # not Linux
    return found


@functools.lru_cache(maxsize=1)
def processor() -> tuple[str, frozenset[str]]:
    """Return the model's name and its instruction-set flags; no flags where none are told.

    >>> isinstance(processor()[0], str)
    True
    """
    import platform  # here: the import of polyattn, which takes the names below, stays as it was

    found = _told()
    model = found.get("model name") or platform.processor() or platform.machine()
    return model, frozenset((found.get("flags") or found.get("Features") or "").split())


@functools.lru_cache(maxsize=1)
def identity() -> Identity:
    """Return who made this processor and which it is: virtual machines often name it no closer.

    >>> identity() == identity()
    True
    """
    import platform  # as above

    told = _told()
    # it starts a process, and a fork meanwhile leaves a child that waits for Python's lock for ever
    known = "vendor_id" in told or "CPU implementer" in told
    name = "" if known else platform.processor()
    return _identity(told, sys.platform, platform.machine(), name)


def _identity(told: dict[str, str], system: str, machine: str, name: str) -> Identity:
    """Take the identity from what Linux, or else Python's platform module, tells.

    >>> name = "AMD64 Family 25 Model 33 Stepping 0, AuthenticAMD"
    >>> print(_identity({}, "win32", "AMD64", name))
    AuthenticAMD family 25 model 33 stepping 0
    """
    if "vendor_id" in told:
        family, model, stepping = (
            _number(told.get(key)) for key in ("cpu family", "model", "stepping")
        )
        return Identity(told["vendor_id"], family, model, stepping)
    if "CPU implementer" in told:
        maker = _IMPLEMENTERS.get(told["CPU implementer"].lower(), told["CPU implementer"])
        part, variant, revision = (
            _number(told.get(f"CPU {key}")) for key in ("part", "variant", "revision")
        )
        return Identity(maker, part, variant, revision)
    found = re.search(r"Family (\d+) Model (\d+) Stepping (\d+), (\w+)", name)
    if found:
        return Identity(found[4], *map(int, found.groups()[:3]))
    return Identity("Apple" if (system, machine) == ("darwin", "arm64") else None)


_IMPLEMENTERS = {"0x41": "ARM", "0x61": "Apple", "0xc0": "Ampere", "0x48": "HiSilicon"}


def _number(text: str | None) -> int | None:
    try:
        return None if text is None else int(text, 0)
    except ValueError:
        return None


@functools.lru_cache(maxsize=1)
def instruction_sets() -> frozenset[str] | None:
    """Return which of :data:`INSTRUCTION_SETS` this processor has; None where nothing tells.

    >>> (instruction_sets() or frozenset()) <= frozenset(INSTRUCTION_SETS)
    True
    """
    flags = processor()[1]
    if "asimd" in flags:  # what Linux calls Neon on 64-bit Arm
        flags |= {"neon"}
    return flags & frozenset(INSTRUCTION_SETS) if flags else None


def level_of(instructions: frozenset[str] | None) -> str | None:
    """Return the best of the instruction sets that kernels are written for; None: none is known.

    >>> level_of(frozenset({"avx", "avx2", "fma"})), level_of(frozenset({"avx512f", "avx2"}))
    ('avx2', 'avx512')
    """
    best = next((name for name in _LEVELS if instructions and name in instructions), None)
    return None if best is None else _NAMES.get(best, best)


def processors_usable() -> int:
    """Return how many processors this process may run on, at least 1.

    >>> processors_usable() >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.lru_cache(maxsize=1)
def processors_quota() -> float | None:
    """Return how many processors' time a container grants; None where nothing limits it.

    >>> (processors_quota() or 1.0) > 0
    True
    """
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as lines:
            granted, period = lines.read().split()
        return round(int(granted) / int(period), 2)
    except (OSError, ValueError, ZeroDivisionError):  # none, or "max"
        return None
