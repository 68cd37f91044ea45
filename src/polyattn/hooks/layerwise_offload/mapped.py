"""Files as memory: weights that lie in a file, seen by everybody as ordinary tensors.

The mapping is private: what somebody writes into such a tensor stays in memory and never reaches
the file. The operating system knows which pages that were, so a changed weight is noticed however
it was changed (``.data``, NumPy, another library), and what is read from the file is never stale.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.direct_read import DirectFile
from polyattn.hooks.layerwise_offload.exact_memory import tensor_over

__all__ = ["FilePart", "MappedFile", "Mapping", "can_see_changes"]

_PAGE = mmap.PAGESIZE
_THERE = np.uint64((1 << 63) | (1 << 62))  # of a page's entry: in memory, or swapped out
_OF_FILE = np.uint64(1 << 61)  # and not a copy of this process's own


_TICK_S = 0.02  # longer than any system's clock of files ticks


@dataclass(frozen=True, slots=True)
class _State:
    """What tells that a file was written to."""

    size: int
    modified_ns: int
    changed_ns: int
    owners: tuple[int, int, int, int]

    @property
    def content(self) -> tuple[int, int]:
        return self.size, self.modified_ns


@dataclass(frozen=True, slots=True)
class FilePart:
    """A run of bytes in a file."""

    file: MappedFile
    start: int
    nbytes: int


_ROOM = "a limit on the address space (ulimit -v) has to leave room for the whole model"


def _what_to_do(error: Exception, else_: str) -> str:
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        return "no file descriptor is left: close files, or raise the limit (ulimit -n)"
    return else_


class MappedFile:
    """An open file whose content must stay as it was when it was opened."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise OffloadError(
                f"got {self.path}, which cannot be opened ({error.strerror}), expected a file of "
                f"weights: {_what_to_do(error, 'look at the path')}"
            ) from error
        weakref.finalize(self, self._file.close)  # who drops a model leaves no file open
        self._settle()
        self._seen = self._state()
        self._direct = DirectFile(self._file.fileno(), self.path)

    @property
    def descriptor(self) -> int:
        """The open file's number."""
        return self._file.fileno()

    @property
    def nbytes(self) -> int:
        """How long the file is."""
        return self._seen.size

    def _state(self) -> _State:
        facts = os.fstat(self._file.fileno())
        owners = facts.st_nlink, facts.st_mode, facts.st_uid, facts.st_gid
        return _State(facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, owners)

    def _settle(self) -> None:
        """Let a file grow older than its clock's tick: no later write is then missed."""
        age = time.time() - os.fstat(self._file.fileno()).st_mtime
        if 0 <= age < _TICK_S:
            time.sleep(_TICK_S - age)

    def rename(self, path: Path) -> None:
        """Give the file, which is this process's own so far, another name."""
        self.path.replace(path)
        self.path, self._seen = path, self._state()

    def check(self) -> None:
        """Raise if somebody has written to the file since it was opened.

        It goes by the file's length and times. The time of its last change of any kind cannot be
        set back, so that a write is seen after which the other time was. What changes that time
        without a write does no harm: links to it that are made and deleted, who may read it.
        """
        now = self._state()
        if now == self._seen:
            return
        if now.content == self._seen.content and now.owners != self._seen.owners:
            self._seen = now
        else:
            raise OffloadError(
                f"got {self.path}, which was written to while a model's weights are read from it, "
                "expected a file that nobody changes: load the model anew"
            )

    def read(self, start: int, into: memoryview) -> None:
        """Read bytes into memory, all of them or an error."""
        done = 0
        while done < len(into):
            got = self._direct.read(start + done, into[done:])
            if got == 0:
                raise OffloadError(
                    f"got the end of {self.path} at byte {start + done:,}, expected "
                    f"{len(into) - done:,} more: the file was cut; load the model anew"
                )
            done += got

    def close(self) -> None:
        """Close the file; mappings of it stay."""
        self._direct.close()
        self._file.close()


class Mapping:
    """A part of a file in memory, from page to page, private to this process."""

    def __init__(self, file: MappedFile, start: int, nbytes: int) -> None:
        first = start // _PAGE * _PAGE
        try:
            self._block = mmap.mmap(
                file.descriptor, start + nbytes - first, offset=first, **_private()
            )
        except (OSError, ValueError) as error:
            raise OffloadError(
                f"got no mapping of {nbytes:,} bytes of {file.path} ({error}), expected one: "
                f"{_what_to_do(error, _ROOM)}"
            ) from error
        self._skip = start - first
        self._nbytes = nbytes
        self._pages = -(-(start + nbytes - first) // _PAGE)
        whole = tensor_over(self._block, 0, 1)
        self._address = whole.data_ptr()

    def tensor(self, start: int, nbytes: int) -> Tensor:
        """Return bytes of the part as a tensor with a storage of its own."""
        return tensor_over(self._block, self._skip + start, nbytes)

    def is_changed(self) -> bool:
        """Whether anything was written into the mapping, as far as the system can tell.

        Where it cannot (not Linux) the answer is False; changes are then seen by torch's count.
        """
        flags = _flags_of_pages(self._address, self._pages)
        return bool(np.any((flags & _THERE != 0) & (flags & _OF_FILE == 0)))

    def is_apart(self) -> bool:
        """Whether all of it was written to, so that the file is not what it shows any more."""
        flags = _flags_of_pages(self._address, self._pages)
        return bool(len(flags) and np.all((flags & _THERE != 0) & (flags & _OF_FILE == 0)))


def _private() -> dict[str, int]:
    if sys.platform == "win32":
        return {"access": mmap.ACCESS_COPY}
    reserve = getattr(mmap, "MAP_NORESERVE", 0)
    return {"flags": mmap.MAP_PRIVATE | reserve, "prot": mmap.PROT_READ | mmap.PROT_WRITE}


def can_see_changes() -> bool:
    """Whether the system says which pages of a private mapping were written to."""
    return sys.platform == "linux" and os.access("/proc/self/pagemap", os.R_OK)


def _flags_of_pages(address: int, count: int) -> np.ndarray:
    """Return the entries of /proc/self/pagemap for pages; none where there is no such file."""
    if not can_see_changes() or count == 0:
        return np.empty(0, np.uint64)
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        data = os.pread(table.fileno(), 8 * count, address // _PAGE * 8)
    return np.frombuffer(data, np.uint64)
