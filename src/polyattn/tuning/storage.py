"""Keeping one table reachable whatever happens to its file.

`Storage` opens the file at first use, brings one of an older schema to ours, notices when it is
replaced, rebuilds it when it is damaged and falls back to memory when it is out of reach. What it
did is told in `notices`.

Three things make this safe between processes, threads and forks:

- Every write holds a lock file beside the table, and so does the one who moves a damaged table
  aside. A journal at the table's name therefore always belongs to the table of that name.
- Before each use the file's identity is compared with the one that was opened, and again after a
  commit; a write that went to a file that is gone is repeated on the new one.
- One lock serves all tables of a process and is held across `fork`, so that a child never
  inherits a transaction. A connection from before the fork is neither used nor closed.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from pathlib import Path
from typing import TypeVar

from polyattn.errors import TuningError
from polyattn.forks import kept_free
from polyattn.tuning import database, rows, snapshots
from polyattn.tuning.database import CorruptFileError, Kind, OlderFileError, transaction
from polyattn.tuning.lock import file_lock
from polyattn.tuning.schema import APPLICATION_ID, SCHEMA_VERSION, create_schema

T = TypeVar("T")
_Identity = tuple[int, int]

_TRIES = 5
_UNLINK = "remove the link, or let it lead to a tuning table or to no file"
_USE_ANOTHER = "make it writable or choose another cache directory"
_MAX_NOTICES = 100
_PROCESS_LOCK = kept_free(threading.RLock())
_INHERITED: list[sqlite3.Connection] = []


class _StaleError(Exception):
    """The open connection no longer shows the file at the table's path."""


class Storage:
    """One SQLite file, or memory in its stead, behind `read` and `write`."""

    def __init__(self, path: Path, busy_timeout_s: float) -> None:
        self.path = path
        self.timeout_s = busy_timeout_s
        self._connection: sqlite3.Connection | None = None
        self._identity: _Identity | None = None
        self._memory: sqlite3.Connection | None = None
        self._in_passing = False
        self._notices: dict[str, None] = {}
        self._changes = 0
        self.writes = 0
        self._data_version: int | None = None
        self._closed = False
        self._resolved = self._is_linked = False
        self._pid = os.getpid()

    def read(self, query: Callable[[sqlite3.Connection], T], missing: T) -> T:
        """What `query` says in one transaction; `missing` where there is no file."""
        with _PROCESS_LOCK:
            self._ready()
            return self._attempt(
                lambda connection: self._run(connection, "BEGIN", query), missing, writing=False
            )

    def write(self, change: Callable[[sqlite3.Connection], T], missing: T, *, create: bool) -> T:
        """Apply `change` all or nothing; without `create`, `missing` where there is no file."""
        with _PROCESS_LOCK:
            self._ready()
            if self._memory is not None or not (create or os.path.lexists(self.path)):
                return missing if self._memory is None else self._change(self._memory, change)
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self._lock():
                    return self._attempt(
                        lambda connection: self._change(connection, change),
                        missing,
                        writing=True,
                        create=create,
                    )
            except TimeoutError as error:
                raise self._busy(error) from error
            except OSError as error:
                memory = self._to_memory(f"cannot be written ({error})", _USE_ANOTHER)
                return self._change(memory, change)

    def generation(self) -> int:
        """A number that grows when this process or another one changed the table."""
        with _PROCESS_LOCK:
            seen = self.read(
                lambda connection: int(connection.execute("PRAGMA data_version").fetchone()[0]),
                None,
            )
            if seen != self._data_version:
                self._data_version = seen
                self._changes += 1
            return self._changes

    def is_persistent(self) -> bool:
        """Whether the table is on disk, as far as can be known without creating it."""
        self.read(lambda connection: None, None)
        return self._memory is None

    def is_in_passing(self) -> bool:
        """Whether memory stands in for the file only until a file descriptor is free."""
        return self._in_passing

    def notices(self) -> list[str]:
        """What went wrong with the file and what was done about it, in order, each once."""
        return list(self._notices)

    def notice(self, text: str) -> None:
        """Add a notice about this file."""
        if len(self._notices) < _MAX_NOTICES:
            self._notices.setdefault(f"tuning table {self.path}: {text}")

    def exclusively(self, action: Callable[[], T]) -> T:
        """Run `action` while no table of this process is in use and no fork can happen."""
        with _PROCESS_LOCK:
            self._ready()
            return action()

    def close(self) -> None:
        """Release the file; every later use is an error."""
        with _PROCESS_LOCK:
            self._leave_to_parent()
            self._drop()
            if self._memory is not None:
                self._memory.close()
            self._closed = True

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    # One attempt after another -------------------------------------------------------------------

    def _attempt(
        self,
        use: Callable[[sqlite3.Connection], T],
        missing: T,
        *,
        writing: bool,
        create: bool = False,
    ) -> T:
        last: Exception | None = None
        for _ in range(_TRIES):
            try:
                connection = self._connect(create)
                return missing if connection is None else use(connection)
            except _StaleError as error:
                last = error
                self._drop()
            except OlderFileError as error:
                last = error
                self._upgrade(writing)
            except (sqlite3.Error, OSError, CorruptFileError) as error:
                last = error
                self._recover(error, writing)
        return use(self._to_memory(f"keeps failing ({last})", _USE_ANOTHER))

    def _run(
        self, connection: sqlite3.Connection, begin: str, body: Callable[[sqlite3.Connection], T]
    ) -> T:
        with transaction(connection, begin):
            if database.stamp(connection) != (APPLICATION_ID, SCHEMA_VERSION):
                raise _StaleError("it changed its schema")
            return body(connection)

    def _change(
        self, connection: sqlite3.Connection, change: Callable[[sqlite3.Connection], T]
    ) -> T:
        result = self._run(connection, "BEGIN IMMEDIATE", change)
        if connection is not self._memory and self._on_disk() != self._identity:
            raise _StaleError("it was replaced")
        self._changes += 1
        self.writes += 1
        return result

    def _recover(self, error: Exception, writing: bool) -> None:
        """Make the next attempt possible: rebuild, or go to memory; raise what neither can cure."""
        if self._memory is not None:
            raise error
        self._drop()
        if database.is_corruption(error):
            self._rebuild(writing)
        elif writing and database.is_busy(error):
            raise self._busy(error) from error
        elif database.is_busy(error):
            self._to_memory(
                f"stayed locked for {self.timeout_s:g} s", "end the program that holds it"
            )
        elif not database.may_pass(error):
            self._to_memory(f"cannot be used ({error})", _USE_ANOTHER)

    def _rebuild(self, holds_lock: bool) -> None:
        if self._is_linked:
            self._leave_alone(Kind.CORRUPT.value)
            return
        lock = nullcontext() if holds_lock else self._lock()
        try:
            with lock:
                aside = database.move_aside_if_corrupt(self.path, self.timeout_s)
        except sqlite3.Error:
            return  # moved or removed meanwhile: the next attempt sees what is there
        except OSError as error:
            self._to_memory(f"is damaged and cannot be moved aside ({error})", "delete it")
            return
        if aside is not None:
            self.notice(f"was damaged; it was moved to {aside} and is rebuilt; measure again")

    def _upgrade(self, holds_lock: bool) -> None:
        """Bring an older file to this schema; its rows are used in memory where that cannot be."""
        try:
            with nullcontext() if holds_lock else self._lock():
                database.upgrade_if_older(self.path, self.timeout_s)
        except (sqlite3.Error, OSError, CorruptFileError) as error:
            if holds_lock and database.is_busy(error):
                raise self._busy(error) from error
            if not (database.is_corruption(error) or database.may_pass(error)):
                self._to_memory(
                    f"is {Kind.OLDER.value} and cannot be brought to this one ({error})",
                    _USE_ANOTHER,
                )

    def _busy(self, error: Exception) -> TuningError:
        return TuningError(
            f"tuning table {self.path}: got no lock within {self.timeout_s:g} s ({error}); "
            "expected other writers to finish; end the program that holds it and record again"
        )

    # Opening and leaving -------------------------------------------------------------------------

    def _ready(self) -> None:
        if self._closed:
            raise TuningError(
                f"tuning table {self.path}: got a use after close(); open a new TuningTable"
            )
        self._leave_to_parent()
        if not self._resolved:  # the journal and the lock lie beside the file, not beside a link
            self._resolved = True
            with suppress(OSError, RuntimeError):
                self._is_linked = self.path.is_symlink()
                self.path = self.path.resolve()
                if self._is_linked and self._on_disk() is not None:
                    self._check_target()
        if self._in_passing and not database.lacks_descriptors():
            self._back_to_disk()

    def _check_target(self) -> None:
        """Keep off a file that a link leads to, unless it is a tuning table: it is somebody's."""
        try:
            kind = database.kind_of(self.path, self.timeout_s)
        except sqlite3.Error:
            return  # out of reach for now: the attempts that follow see to it
        if kind in (Kind.FRESH, Kind.CORRUPT):
            self._leave_alone(kind.value)

    def _leave_alone(self, what: str) -> None:
        self._to_memory(f"is reached by a link and is {what}, which is left alone", _UNLINK)

    def _lock(self) -> AbstractContextManager[None]:
        return file_lock(database.beside(self.path, ".lock"), self.timeout_s)

    def _leave_to_parent(self) -> None:
        """After a fork, put the parent's connection out of reach: using or closing it is unsafe."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            if self._connection is not None:
                _INHERITED.append(self._connection)
                self._connection = self._identity = None
                self._changes += 1

    def _drop(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = self._identity = None
            self._changes += 1

    def _connect(self, create: bool) -> sqlite3.Connection | None:
        if self._memory is not None:
            return self._memory
        identity = self._on_disk()
        if self._connection is not None and identity == self._identity:
            return self._connection
        self._drop()
        if identity is None and not create:
            return None
        if identity is None:
            database.connect(self.path, "rwc", self.timeout_s).close()
            identity = self._on_disk()
        return self._open(identity, create)

    def _open(self, identity: _Identity | None, create: bool) -> sqlite3.Connection | None:
        connection = database.connect(self.path, "rw", self.timeout_s)
        try:
            kind = database.inspect(connection)
            if kind is Kind.FRESH and create:
                with transaction(connection, "BEGIN IMMEDIATE"):
                    create_schema(connection)
                kind = Kind.OURS
            if kind is Kind.CORRUPT:
                raise CorruptFileError(kind.value)
            if kind is Kind.OLDER:
                raise OlderFileError(kind.value)
            if kind is Kind.OURS and self._on_disk() != identity:
                raise _StaleError("it was replaced")
        except BaseException:
            connection.close()
            raise
        if kind is Kind.OURS:
            self._connection, self._identity = connection, identity
            self._changes += 1
            return connection
        connection.close()
        if kind is not Kind.FRESH:
            self._to_memory(
                f"is {kind.value}", "upgrade polyattn, or choose another cache directory"
            )
        return self._memory

    def _on_disk(self) -> _Identity | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is not a regular file")
        return found.st_dev, found.st_ino

    def _back_to_disk(self) -> None:
        """Leave the memory that stood in while no file descriptor was left, with what it holds."""
        memory, self._memory, self._in_passing = self._memory, None, False
        self._changes += 1
        self.writes += 1  # snapshots that were made of the memory are of the past
        if memory is None:
            return
        with closing(memory):
            entries = rows.select(memory, None, self.notice)
            texts = snapshots.select(memory, rows.named(entries))
        try:
            if entries:
                self.write(lambda disk: rows.replace_older(disk, entries, texts), 0, create=True)
        except TuningError as error:  # a reader comes here, too, who wants no more than to read
            self.notice(f"{len(entries)} times that were kept in memory are lost ({error})")

    def _to_memory(self, problem: str, advice: str) -> sqlite3.Connection:
        """Go on in memory, with what can still be read from the file."""
        self._drop()
        self._memory = memory = database.connect_memory()
        self._changes += 1
        if database.lacks_descriptors():
            self._in_passing = True
            self.notice(
                "no file descriptor was left; measured times were kept in memory until one was; "
                "close files, or raise the limit (ulimit -n)"
            )
            return memory
        with suppress(sqlite3.Error, OSError, CorruptFileError, _StaleError):
            if self._on_disk() is not None:
                database.fill(memory, database.contents(self.path, "ro", timeout_s=0.1))
        self.notice(
            f"{problem}; measured times are kept in memory and lost when the process ends; {advice}"
        )
        return memory
