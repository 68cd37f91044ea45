"""The rows of the tuning table in SQL: schema, writing, and reading with every value checked.

Each row carries a checksum over its values. SQLite notices damage to its pages' structure but not
to the values in them, and a flipped bit in a time would be a wrong answer.
"""

from __future__ import annotations

import dataclasses
import sqlite3
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from polyattn.errors import TuningError
from polyattn.tuning.values import Key, Measurement, instant, refuse

APPLICATION_ID = 0x504C5954  # "PLYT"
SCHEMA_VERSION = 1

KEY_COLUMNS = tuple(field.name for field in dataclasses.fields(Key))
COLUMNS = KEY_COLUMNS + tuple(field.name for field in dataclasses.fields(Measurement))
IDENTITY = (*KEY_COLUMNS, "backend", "config")

META_SQL = "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"
# One b-tree and no second index: nothing in the file can disagree with the rows themselves.
MEASUREMENTS_SQL = """CREATE TABLE measurements (
    device TEXT NOT NULL, versions TEXT NOT NULL, problem TEXT NOT NULL,
    backend TEXT NOT NULL, config TEXT NOT NULL,
    median_s REAL NOT NULL, min_s REAL NOT NULL, max_s REAL NOT NULL, repeats INTEGER NOT NULL,
    error REAL NOT NULL, tolerance REAL NOT NULL, verified INTEGER NOT NULL,
    measured_at TEXT NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (device, versions, problem, backend, config)
) WITHOUT ROWID"""
SCHEMA = {"meta": META_SQL, "measurements": MEASUREMENTS_SQL}

_ALL = ", ".join((*COLUMNS, "checksum"))
_SELECT = f"SELECT {_ALL} FROM measurements"
_INSERT = (
    f"INSERT OR REPLACE INTO measurements ({_ALL}) VALUES ({', '.join('?' * (len(COLUMNS) + 1))})"
)
_ORDER = f" ORDER BY {', '.join(IDENTITY)}"

Entry = tuple[Key, Measurement]
Row = tuple[object, ...]


def create_schema(connection: sqlite3.Connection) -> None:
    """Make the tables of an empty database; the caller holds the transaction."""
    for statement in SCHEMA.values():
        connection.execute(statement)
    meta = [("application", "polyattn tuning table"), ("schema", str(SCHEMA_VERSION))]
    connection.executemany("INSERT INTO meta (name, value) VALUES (?, ?)", meta)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def encode(entry: Entry) -> Row:
    """The row of an entry, its checksum last."""
    key, measurement = entry
    values = *_values(key), *_values(measurement)
    plain = tuple(int(value) if isinstance(value, bool) else value for value in values)
    return (*plain, _checksum(plain))


def decode(row: Row) -> Entry:
    """The entry of a row, or TuningError if any value is not what was once written."""
    *values, checksum = row
    named: dict[str, object] = dict(zip(COLUMNS, values, strict=True))
    if type(named["verified"]) is not int or named["verified"] not in (0, 1):
        raise refuse("verified", named["verified"], "0 or 1", "measure again")
    key = Key(*(named[name] for name in KEY_COLUMNS))  # type: ignore[arg-type]
    rest = {name: named[name] for name in COLUMNS[len(KEY_COLUMNS) :]}
    rest["verified"] = bool(rest["verified"])
    measurement = Measurement(**rest)  # type: ignore[arg-type]
    if checksum != _checksum(values):
        raise refuse("checksum", checksum, str(_checksum(values)), "measure again")
    return key, measurement


def select(
    connection: sqlite3.Connection, key: Key | None, report: Callable[[str], None]
) -> list[Entry]:
    """The valid entries, of one key or of all, in a fixed order; each other row is reported."""
    if key is None:
        rows = connection.execute(_SELECT + _ORDER).fetchall()
    else:
        rows = connection.execute(
            f"{_SELECT} WHERE {_equal(KEY_COLUMNS)}{_ORDER}", _values(key)
        ).fetchall()
    return decode_all(rows, report)


def select_raw(connection: sqlite3.Connection) -> list[Row]:
    """Every row as it is stored, for a copy."""
    return connection.execute(_SELECT).fetchall()


def insert_raw(connection: sqlite3.Connection, rows: Iterable[Row]) -> None:
    """Write stored rows as they are."""
    connection.executemany(_INSERT, rows)


def replace(connection: sqlite3.Connection, entries: Iterable[Entry]) -> None:
    """Write entries; one with the same key, backend and config gives way."""
    insert_raw(connection, map(encode, entries))


def replace_older(connection: sqlite3.Connection, entries: Iterable[Entry]) -> int:
    """Write the entries that are new here or newer than what is here; their number."""
    written = 0
    for key, measurement in entries:
        identity = (*_values(key), measurement.backend, measurement.config)
        row = connection.execute(f"{_SELECT} WHERE {_equal(IDENTITY)}", identity).fetchone()
        if row is None or _is_older(row, measurement):
            replace(connection, [(key, measurement)])
            written += 1
    return written


def delete(
    connection: sqlite3.Connection, key: Key | None, device: str | None, backend: str | None
) -> int:
    """Delete the rows that match everything that is given; their number."""
    wanted: list[tuple[str, str]] = list(zip(KEY_COLUMNS, _values(key), strict=True)) if key else []
    wanted += [
        (name, value)
        for name, value in (("device", device), ("backend", backend))
        if value is not None
    ]
    where = _equal(name for name, _ in wanted) if wanted else "1"
    return connection.execute(
        f"DELETE FROM measurements WHERE {where}", [value for _, value in wanted]
    ).rowcount


def decode_all(rows: list[Row], report: Callable[[str], None]) -> list[Entry]:
    """The entries of the rows that are valid; each other one is reported."""
    entries = []
    for row in rows:
        try:
            entries.append(decode(row))
        except TuningError as error:
            backend = row[COLUMNS.index("backend")]
            report(f"a row of backend {backend!r} is not valid and is ignored: {error}")
    return entries


def _is_older(row: Row, measurement: Measurement) -> bool:
    try:
        present = decode(row)[1]
    except TuningError:
        return True
    return instant(present.measured_at) < instant(measurement.measured_at)


def _values(item: Key | Measurement) -> tuple[Any, ...]:
    return tuple(getattr(item, field.name) for field in dataclasses.fields(item))


def _equal(names: Iterable[str]) -> str:
    return " AND ".join(f"{name} = ?" for name in names)


def _checksum(values: Iterable[object]) -> int:
    text = "\x1f".join(map(repr, values))
    return zlib.crc32(text.encode("utf-8", "backslashreplace"))
