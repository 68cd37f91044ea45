"""Allocator: have the C library keep what is freed, so that no forward pays for having it again.

glibc gives the end of the heap back to the system once more than a threshold of it is free, and the
threshold depends on what was freed before. So in some blocks of forwards thousands of pages are
given back and faulted in anew, 10 us each in a virtual machine, and in others none: a noise that is
larger than what is measured. It is the same for what is measured and for what it is compared with.
"""

from __future__ import annotations

import ctypes

__all__ = ["KEEPS", "SYSTEM", "keep_memory", "page_faults"]

KEEPS = "keeps what it has"
SYSTEM = "as the system sets it"

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_LARGEST = 32 << 20
"""glibc refuses to put more than that into the heap."""


def keep_memory() -> str:
    """Have glibc keep freed memory for the rest of the process, for it cannot be asked how it was.

    Returns KEEPS, or SYSTEM where there is no glibc: then nothing is changed.
    """
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - musl and others have no such function
        mallopt = library.mallopt
    except (AttributeError, OSError, TypeError):
        return SYSTEM
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    done = mallopt(_TRIM_THRESHOLD, _NEVER), mallopt(_MMAP_THRESHOLD, _LARGEST)
    return KEEPS if all(done) else SYSTEM


def page_faults() -> int:
    """Return how many pages the process was given so far; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
