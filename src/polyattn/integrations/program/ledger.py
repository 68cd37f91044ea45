"""Where one process writes down what it asked: a line for each new thing, and a count beside it.

A :class:`Ledger` is in memory. A :class:`FileLedger` lies in two files of a folder: the lines,
appended one at a time, and the counts, mapped into memory. The counts belong to the system and not
to the process, so that a process that is killed in the middle of its work loses nothing, and
counting a call costs no system call. A lock on the counts, which ends with its process however that
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
    """Entries, and how often each occurred: ``counts[place]``, raised by who has the place."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.counts: MutableSequence[int] = [0]

    def add(self, entry: Entry) -> int:
        """Write an entry down; returns the place of its count."""
        self.entries.append(entry)
        self.counts.append(0)
        return len(self.entries)


class FileLedger(Ledger):
    """A ledger in a folder; `process` gives what this process is called, when it first has to.

    Where it cannot be written, a line on stderr says so, once, and the program goes on.
    """

    def __init__(self, folder: Path, process: Callable[[], Process]) -> None:
        super().__init__()
        self._folder, self._process = folder, process
        self._lines: Any = None
        self._mapped: _Counts | None = None
        self._said: Process | None = None
        self._lost = False

    def begin(self) -> None:
        """Make the files, if they are not there yet, and say what this process is called now."""
        if self._lost:
            return
        if self._lines is None:
            self._open()
        process = self._process()
        if process != self._said:
            self._said = process
            self._write({"kind": "process", **plain(process)})

    def add(self, entry: Entry) -> int:
        """Write an entry down, as a line of the file."""
        self.begin()
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

    def _open(self) -> None:
        name = self._folder / f"{os.getpid()}-{time.time_ns()}"
        try:
            self._mapped = _Counts(name.with_suffix(".counts"))
            self._lines = open(  # noqa: SIM115 - for as long as the process lasts
                name.with_suffix(".jsonl"), "ab", buffering=0
            )
            self.counts = self._mapped.room_for(ENDED)
        except OSError as error:
            self._lose(error)

    def _write(self, line: dict[str, Any]) -> None:
        if self._lost or self._lines is None:
            return
        text = json.dumps(line).encode() + b"\n"
        try:
            if self._lines.write(text) != len(text):  # a part of a line is no line to its reader
                raise OSError("no space is left")
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Count on in memory, for nobody: the run is over, or its folder cannot be written."""
        self._lost = True
        self._mapped = None
        self.counts = [0] * (len(self.entries) + 1)
        if self._folder.is_dir():
            sys.stderr.write(
                f"polyattn run: what process {os.getpid()} asks of attention cannot be written to "
                f"{self._folder} ({error}), and is not in the report\n"
            )


class _Counts:
    """Counts of eight bytes each, in a file that is mapped, and grows."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w+b", buffering=0)  # noqa: SIM115 - locked while it is open
        self._room = 0
        self._view: Any = None
        _lock(self._file)

    def room_for(self, place: int) -> MutableSequence[int]:
        """Return the counts, of which there are more than `place`."""
        if place >= self._room:
            more = max(_COUNTS_AT_FIRST, self._room)
            # written and not only made longer: a full disk is an error here, and not a crash later
            self._file.seek(0, os.SEEK_END)
            if self._file.write(bytes(8 * more)) != 8 * more:
                raise OSError("no space is left")
            self._room += more
            self._view = memoryview(mmap.mmap(self._file.fileno(), 8 * self._room)).cast("Q")
        return self._view  # type: ignore[no-any-return]


def _lock(file: Any) -> None:
    """Hold the file while this process lives; a lock of this kind is no fork's."""
    with suppress(ImportError):  # not on Windows, where nobody asks for it either
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(path: Path) -> bool:
    """Whether the process that counts in this file is still there."""
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
