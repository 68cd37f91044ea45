"""Reads from files past the page cache, unless the bytes are in it already.

A model that does not fit in memory does not fit in the page cache either: reading it through the
cache takes the processor's time to fill pages that are thrown out again. So what is cached is
copied, and the rest goes from the disk straight into memory.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from polyattn.hooks.layerwise_offload.exact_memory import pages

__all__ = ["DirectFile"]

_BLOCK = 4096
_BOUNCE = 10 << 20


class _Bounce(threading.local):
    """Aligned memory of a thread, for bytes that lie otherwise in the file than in memory."""

    memory: np.ndarray | None = None

    def take(self) -> np.ndarray:
        if self.memory is None:
            self.memory = np.frombuffer(pages(_BOUNCE), np.uint8)
        return self.memory


_bounce = _Bounce()


class DirectFile:
    """An open file that is read in the cheaper of two ways."""

    def __init__(self, descriptor: int, path: Path) -> None:
        """`descriptor`: of the open file; `path`: where it was opened."""
        self._cached = descriptor
        self._direct = _open_direct(descriptor, path)
        # who drops a model without detaching it leaves no file open
        self._close_direct = weakref.finalize(self, _close, self._direct)

    def read(self, start: int, into: memoryview) -> int:
        """Read some bytes, at least one before the end of the file; return how many."""
        if self._direct < 0 or len(into) < _BLOCK:
            return os.preadv(self._cached, [into], start)
        if _is_cached(self._cached, start, len(into)):
            return os.preadv(self._cached, [into], start)
        try:
            return self._straight(start, into)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.close()  # a file system that promises it and does not do it
            return os.preadv(self._cached, [into], start)

    def close(self) -> None:
        """Close what was opened here."""
        self._direct = -1
        self._close_direct()

    def _straight(self, start: int, into: memoryview) -> int:
        """Read whole blocks in place, or where they lie otherwise in memory, by way of a bounce."""
        memory = np.frombuffer(into, np.uint8)
        if start % _BLOCK == 0 and memory.ctypes.data % _BLOCK == 0:
            return os.preadv(self._direct, [into[: len(into) // _BLOCK * _BLOCK]], start)
        first = start // _BLOCK * _BLOCK
        bounce = _bounce.take()
        length = min(len(bounce), -(-(start + len(into) - first) // _BLOCK) * _BLOCK)
        got = os.preadv(self._direct, [bounce[:length].data], first) - (start - first)
        count = max(0, min(got, len(into)))
        np.copyto(memory[:count], bounce[start - first : start - first + count])
        return count


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def _open_direct(descriptor: int, path: Path) -> int:
    """Open the file again without the cache, if it still is the same one; -1 if that cannot be."""
    if not hasattr(os, "O_DIRECT"):
        return -1
    try:
        again = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return -1
    if os.path.sameopenfile(descriptor, again):
        return again
    os.close(again)
    return -1


def _is_cached(descriptor: int, start: int, length: int) -> bool:
    """Whether all of a range is in the page cache. (RWF_NOWAIT would ask, and start filling it.)"""
    ask = _mincore()
    if ask is None:
        return True
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(start + length - first) // mmap.PAGESIZE)
    try:
        block = mmap.mmap(
            descriptor, start + length - first, mmap.MAP_SHARED, mmap.PROT_READ, offset=first
        )
    except (OSError, ValueError):
        return True
    found = np.zeros(pages, np.uint8)
    address = np.frombuffer(block, np.uint8).ctypes.data
    failed = ask(address, len(block), found.ctypes.data)
    return not failed and bool((found & 1).all())


@cache
def _mincore() -> Any:
    """Return the system's function that says which pages of a mapping are in memory, if it is."""
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "mincore", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return function
