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
_BOUNCE = 2 << 20
"""What is larger has left the cache when it is copied on; what is smaller makes a disk slow."""


class _Bounce(threading.local):
    """Aligned memory of a thread, for bytes that lie otherwise in the file than in memory."""

    memory: np.ndarray | None = None

    def take(self, length: int) -> np.ndarray:
        """Return memory that was touched, so that a measured peak has it in any case."""
        if self.memory is None or len(self.memory) < length:
            self.memory = None  # goes before the next comes
            self.memory = np.frombuffer(pages(length), np.uint8)
            self.memory[::_BLOCK] = 0
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
        memory = np.frombuffer(into, np.uint8)
        bounce = None
        if start % _BLOCK or memory.ctypes.data % _BLOCK:
            # taken whether it is needed now or not: the next time nothing may be in the cache
            bounce = _bounce.take(min(_BOUNCE, _in_blocks(start % _BLOCK + len(into))))
        if _is_cached(self._cached, start, len(into)):
            return os.preadv(self._cached, [into], start)
        try:
            if bounce is None:
                whole = into[: len(into) // _BLOCK * _BLOCK]
                return os.preadv(self._direct, [whole], start)
            return self._by_way_of(bounce, start, memory)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.close()  # a file system that promises it and does not do it
            return os.preadv(self._cached, [into], start)

    def close(self) -> None:
        """Close what was opened here."""
        self._direct = -1
        self._close_direct()

    def _by_way_of(self, bounce: np.ndarray, start: int, memory: np.ndarray) -> int:
        """Read whole blocks that lie otherwise in memory."""
        skip = start % _BLOCK
        length = min(len(bounce), _in_blocks(skip + len(memory)))
        got = os.preadv(self._direct, [bounce[:length].data], start - skip) - skip
        count = max(0, min(got, len(memory)))
        np.copyto(memory[:count], bounce[skip : skip + count])
        return count


def _in_blocks(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK


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
