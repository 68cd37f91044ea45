"""Where one process writes down what it asked: a line for each new thing, and a count beside it.

A :class:`Ledger` is in memory. A :class:`FileLedger` lies in two files of a folder: the lines,
appended one at a time, and the counts, mapped into memory. The counts belong to the system and not
to the process, so that a process that is killed in the middle of its work loses nothing, and
counting a call costs no system call. A lock on the lines, which ends with its process however that
ends, says whether the process is still there.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable, MutableSequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyattn.integrations.program.asked import Case, Passed, Process, Ran, Unseen
from polyattn.integrations.program.entries import plain, plain_case

__all__ = ["ENDED", "Entry", "FileLedger", "Ledger", "RanOn", "is_locked"]

ENDED = 0
"""The place of the count that is 1 once the process has ended by itself."""

_COUNTS_AT_FIRST = 512


@dataclass(frozen=True)
class RanOn:
    """A case, by its place in the ledger, on what it ran on."""

    case: int
    ran: Ran


Entry = Process | Case | RanOn | Passed | Unseen


class Ledger:
    """Entries, and how often each occurred: ``counts[place]``, raised by who has the place.

    Adding an entry may replace `counts`: the place first, then the counts.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.counts: MutableSequence[int] = [0]

    def add(self, entry: Entry) -> int:
        """Write an entry down; returns the place of its count."""
        self.entries.append(entry)
        self.counts.append(0)
        return len(self.entries)

    def count(self, place: int, times: int = 1) -> None:
        """Count what is at a place."""
        self.counts[place] += times


class FileLedger(Ledger):
    """A ledger in a folder; ``process(asked)`` says what this process is called at present.

    `asked`: whether it has asked anything yet.

    Where it cannot be written, a line on stderr says so, once, and the program goes on.
    """

    def __init__(self, folder: Path, process: Callable[[bool], Process]) -> None:
        super().__init__()
        self._folder, self._process = folder, process
        self._lines: int | None = None
        self._mapped: _Counts | None = None
        self._said: Process | None = None
        self._lost = False

    def begin(self, asked: bool = False) -> None:
        """Make the files, if they are not there yet, and say what this process is called now."""
        if self._lost:
            return
        if self._lines is None:
            self._open()
        process = self._process(asked)
        if process != self._said:
            self._said = process
            self._write({"kind": "process", **plain(process)})

    def add(self, entry: Entry) -> int:
        """Write an entry down, as a line of the file."""
        self.begin(asked=True)
        place = super().add(entry) if self._mapped is None else self._added(entry)
        self._write({"at": place, **_line(entry)})
        return place

    def end(self) -> None:
        """Note that the process ends by itself."""
        if self._mapped is not None:
            self.counts[ENDED] = 1

    def _added(self, entry: Entry) -> int:
        self.entries.append(entry)
        place = len(self.entries)
        try:
            assert self._mapped is not None
            self.counts = self._mapped.room_for(place)
        except OSError as error:
            self._lose(error)
        return place

    def close(self) -> None:
        """Let go of the files; for a fork, whose parent's they are."""
        if self._lines is not None:
            os.close(self._lines)
        if self._mapped is not None:
            os.close(self._mapped.file)
        self._lines = self._mapped = None

    def _open(self) -> None:
        name = self._folder / f"{os.getpid()}-{time.time_ns()}"
        try:
            self._mapped = _Counts(_created(name.with_suffix(".counts")))
            self._lines = _created(name.with_suffix(".jsonl"))
            _lock(self._lines)
            self.counts = self._mapped.room_for(ENDED)
        except OSError as error:
            self._lose(error)

    def _write(self, line: dict[str, Any]) -> None:
        if self._lost or self._lines is None:
            return
        try:
            _write_whole(self._lines, json.dumps(line).encode() + b"\n")
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Count on in memory, for nobody: the run is over, or its folder cannot be written."""
        self._lost = True
        self.close()
        self.counts = [0] * (len(self.entries) + 1)
        if self._folder.is_dir():
            sys.stderr.write(
                f"polyattn run: what process {os.getpid()} asks of attention cannot be written to "
                f"{self._folder} ({error}), and is not in the report\n"
            )


class _Counts:
    """Counts of eight bytes each, in a file that is mapped, and grows."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._room = 0
        self._view: Any = None

    def room_for(self, place: int) -> MutableSequence[int]:
        """Return the counts, of which there are more than `place`."""
        if place >= self._room:
            more = max(_COUNTS_AT_FIRST, self._room)
            # written and not only made longer: a full disk is an error here, and not a crash later
            _write_whole(self.file, bytes(8 * more))
            self._room += more
            self._view = memoryview(mmap.mmap(self.file, 8 * self._room)).cast("Q")
        return self._view  # type: ignore[no-any-return]


# Numbers of files and not objects: a program must hear nothing of files that are never closed.


def _created(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, 0o600)


def _write_whole(file: int, text: bytes) -> None:
    if os.write(file, text) != len(text):  # a part of a line is no line to its reader
        raise OSError("no space is left")


def _lock(file: int) -> None:
    """Hold the file while this process lives; a lock of this kind is no fork's.

    It would end, too, if this process closed another descriptor of the same file, as a mapping has.
    """
    with suppress(ImportError):  # not on Windows, where nobody asks for it either
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(path: Path) -> bool:
    """Whether the process that writes these lines is still there."""
    try:
        import fcntl
    except ImportError:
        return False
    with path.open("rb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _line(entry: Entry) -> dict[str, Any]:
    if isinstance(entry, Case):
        return {"kind": "case", **plain_case(entry)}
    if isinstance(entry, RanOn):
        return {"kind": "ran", "case": entry.case, **plain(entry.ran)}
    kind = {Passed: "passed", Unseen: "unseen", Process: "process"}[type(entry)]
    return {"kind": kind, **plain(entry)}
