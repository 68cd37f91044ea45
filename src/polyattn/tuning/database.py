"""One SQLite file: connecting, telling whose it is and whether it is whole, moving it aside.

The file is only ever opened through SQLite: closing any other descriptor of it would drop the
locks that SQLite holds for this process.
"""

from __future__ import annotations

import enum
import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from polyattn.tuning import rows, snapshots
from polyattn.tuning.schema import APPLICATION_ID, SCHEMA_VERSION, SCHEMAS, create_schema, upgrade

_CORRUPT = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_SCHEMA,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_TOOBIG,
}


class Kind(enum.Enum):
    """What a database file is to us."""

    FRESH = "an empty file"
    OURS = "a tuning table of this schema"
    OLDER = "a tuning table of an older schema"
    NEWER = "a tuning table of a newer schema"
    FOREIGN = "a database of another application"
    CORRUPT = "a damaged file"


class CorruptFileError(Exception):
    """The file at the table's path is damaged."""


class OlderFileError(Exception):
    """The file at the table's path is whole, and of an older schema."""


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code of an error; 0 where the error did not come from SQLite."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def is_corruption(error: Exception) -> bool:
    """Whether an error may mean that the file is damaged; inspecting it again decides."""
    if isinstance(error, CorruptFileError):
        return True
    return isinstance(error, sqlite3.Error) and primary_code(error) in _CORRUPT


def is_busy(error: Exception) -> bool:
    """Whether an error means that another program kept the file locked."""
    codes = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return isinstance(error, sqlite3.Error) and primary_code(error) in codes


def may_pass(error: Exception) -> bool:
    """Whether an error may be gone at the next try: the file was moved or cut under our hands."""
    codes = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
    return isinstance(error, sqlite3.Error) and primary_code(error) in codes


def lacks_descriptors() -> bool:
    """Whether this process can open no file at present, of which SQLite says "unable to open"."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


def connect(path: Path, mode: str, timeout_s: float) -> sqlite3.Connection:
    """Open `path` with SQLite's mode `ro`, `rw` or `rwc`; transactions are begun by hand."""
    return _prepare(f"{path.as_uri()}?mode={mode}", timeout_s)


def connect_memory() -> sqlite3.Connection:
    """An empty table in memory."""
    connection = _prepare("file::memory:", 0.0)
    with transaction(connection, "BEGIN"):
        create_schema(connection)
    return connection


def _prepare(uri: str, timeout_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False
    )
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    try:
        connection.execute("PRAGMA cell_size_check = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    """All or nothing: commit at the end, roll back on any exception, an interrupt included."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException as error:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        if isinstance(error, UnicodeDecodeError):  # SQLite's message quotes the damaged file
            raise CorruptFileError(Kind.CORRUPT.value) from error
        raise


def inspect(connection: sqlite3.Connection) -> Kind:
    """Whose file this is, and whether it is whole. Reads only; costs a pass over our own table."""
    try:
        with transaction(connection, "BEGIN"):
            return _kind(connection)
    except (sqlite3.Error, CorruptFileError) as error:
        if is_corruption(error):
            return Kind.CORRUPT
        raise


def kind_of(path: Path, timeout_s: float) -> Kind:
    """Whose file lies at `path`, without a trace of having looked."""
    with closing(connect(path, "ro", timeout_s)) as connection:
        return inspect(connection)


def stamp(connection: sqlite3.Connection) -> tuple[int, int]:
    """The application id and the schema version that the file carries."""
    return _pragma(connection, "application_id"), _pragma(connection, "user_version")


def _kind(connection: sqlite3.Connection) -> Kind:
    application, version = stamp(connection)
    if application not in (0, APPLICATION_ID):
        return Kind.FOREIGN
    stored = dict(
        connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    )
    if application == 0:
        return Kind.FOREIGN if stored or version else Kind.FRESH
    if version > SCHEMA_VERSION:
        return Kind.NEWER
    # what ANALYZE leaves in a table that somebody has looked into; ours never makes it
    stored = {name: sql for name, sql in stored.items() if not name.startswith("sqlite_stat")}
    if stored != SCHEMAS.get(version):
        return Kind.CORRUPT
    if connection.execute("PRAGMA integrity_check(1)").fetchall() != [("ok",)]:
        return Kind.CORRUPT
    return Kind.OURS if version == SCHEMA_VERSION else Kind.OLDER


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def move_aside_if_corrupt(path: Path, timeout_s: float) -> Path | None:
    """Move a damaged file and what SQLite left beside it to `<path>.corrupt-<n>`; the new name.

    The caller holds the file lock, so nobody else moves or writes; the file is inspected again
    because another process may have rebuilt it meanwhile.
    """
    with closing(connect(path, "rw", timeout_s)) as connection:
        if inspect(connection) is not Kind.CORRUPT:
            return None
    number = 1
    while os.path.lexists(aside := beside(path, f".corrupt-{number}")):
        number += 1
    for suffix in ("-journal", "-wal", "-shm", ""):
        with suppress(FileNotFoundError):
            beside(path, suffix).rename(beside(aside, suffix))
    return aside


def beside(path: Path, suffix: str) -> Path:
    """The path with `suffix` put to its name."""
    return path.with_name(path.name + suffix)


class Contents(NamedTuple):
    """All that a table's file holds, as it is stored: rows, and pairs of digest and snapshot."""

    rows: list[rows.Row]
    flags: list[tuple[object, ...]]


def contents(path: Path, mode: str, timeout_s: float) -> Contents:
    """What a whole table of this schema or an older one holds; CorruptFileError for any other."""
    with closing(connect(path, mode, timeout_s)) as connection:
        kind = inspect(connection)
        if kind not in (Kind.OURS, Kind.OLDER):
            raise CorruptFileError(kind.value)
        with transaction(connection, "BEGIN"):
            _, schema = stamp(connection)
            flags = snapshots.select_raw(connection) if schema == SCHEMA_VERSION else []
            return Contents(rows.select_raw(connection, schema), flags)


def fill(connection: sqlite3.Connection, stored: Contents) -> None:
    """Write what another file held."""
    with transaction(connection, "BEGIN"):
        rows.insert_raw(connection, stored.rows)
        snapshots.insert(connection, stored.flags)


def upgrade_if_older(path: Path, timeout_s: float) -> None:
    """Bring a whole file of an older schema to ours: all of it or nothing.

    Whether it still is older is seen in the same transaction: another process may have been first.
    """
    with (
        closing(connect(path, "rw", timeout_s)) as connection,
        transaction(connection, "BEGIN IMMEDIATE"),
    ):
        if _kind(connection) is Kind.OLDER:
            upgrade(connection)
