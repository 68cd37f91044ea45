"""The rows of the tuning table in SQL: writing, and reading with every value checked.

Each row carries a checksum over its values. SQLite notices damage to its pages' structure but not
to the values in them, and a flipped bit in a time would be a wrong answer. A row names the snapshot
of the flags that it was measured under; one whose snapshot is gone or damaged is not valid.
"""

from __future__ import annotations

import dataclasses
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from polyattn.errors import TuningError
from polyattn.tuning import snapshots
from polyattn.tuning.snapshots import Texts
from polyattn.tuning.values import Key, Measurement, instant, refuse

KEY_COLUMNS = tuple(field.name for field in dataclasses.fields(Key))
COLUMNS = KEY_COLUMNS + tuple(field.name for field in dataclasses.fields(Measurement))
IDENTITY = (*KEY_COLUMNS, "backend", "config")

_FLAGS = COLUMNS.index("flags")
_ALL = ", ".join((*COLUMNS, "checksum"))
_SELECT = f"SELECT {_ALL} FROM measurements"
_INSERT = (
    f"INSERT OR REPLACE INTO measurements ({_ALL}) VALUES ({', '.join('?' * (len(COLUMNS) + 1))})"
)
_ORDER = f" ORDER BY {', '.join(IDENTITY)}"

Entry = tuple[Key, Measurement]
Row = tuple[object, ...]


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
    connection: sqlite3.Connection,
    key: Key | None,
    report: Callable[[str], None],
    device: str | None = None,
    versions: str | None = None,
) -> list[Entry]:
    """The valid entries of what is given, in a fixed order; each other row is reported."""
    wanted = _wanted(key, device=device, versions=versions)
    where = f" WHERE {_equal(name for name, _ in wanted)}" if wanted else ""
    rows = connection.execute(
        f"{_SELECT}{where}{_ORDER}", [value for _, value in wanted]
    ).fetchall()
    named = {name for row in rows if isinstance(name := row[_FLAGS], str) and name}
    return decode_all(rows, snapshots.select(connection, named), report)


def select_raw(connection: sqlite3.Connection, schema: int) -> list[Row]:
    """Every row as it is stored in a file of this schema or an older one, for a copy."""
    if schema == 1:
        return connection.execute(_SELECT.replace("flags", "''")).fetchall()
    return connection.execute(_SELECT).fetchall()


def insert_raw(connection: sqlite3.Connection, rows: Iterable[Row]) -> None:
    """Write stored rows as they are."""
    connection.executemany(_INSERT, rows)


def replace(connection: sqlite3.Connection, entries: list[Entry], texts: Texts) -> None:
    """Write entries and snapshots; what has the same key, backend and config gives way.

    TuningError, and the caller's transaction writes nothing, if an entry names a snapshot that is
    neither given nor stored.
    """
    _write_snapshots(connection, entries, texts)
    insert_raw(connection, map(encode, entries))
    snapshots.prune(connection)


def replace_older(connection: sqlite3.Connection, entries: list[Entry], texts: Texts) -> int:
    """Write the entries that are new here or newer than what is here; their number."""
    _write_snapshots(connection, entries, texts)
    written = 0
    for key, measurement in entries:
        identity = (*_values(key), measurement.backend, measurement.config)
        row = connection.execute(f"{_SELECT} WHERE {_equal(IDENTITY)}", identity).fetchone()
        if row is None or _is_older(row, measurement):
            insert_raw(connection, [encode((key, measurement))])
            written += 1
    snapshots.prune(connection)
    return written


def _write_snapshots(connection: sqlite3.Connection, entries: list[Entry], texts: Texts) -> None:
    snapshots.insert(connection, texts.items())
    known = snapshots.select(connection, named(entries))
    for _, measurement in entries:
        snapshots.require(measurement.flags, known)


def named(entries: Iterable[Entry]) -> list[str]:
    """The digests that entries name, each once, in order."""
    return list(dict.fromkeys(one.flags for _, one in entries if one.flags))


def delete(
    connection: sqlite3.Connection, key: Key | None, device: str | None, backend: str | None
) -> int:
    """Delete the rows that match everything that is given; their number."""
    wanted = _wanted(key, device=device, backend=backend)
    where = _equal(name for name, _ in wanted) if wanted else "1"
    deleted = connection.execute(
        f"DELETE FROM measurements WHERE {where}", [value for _, value in wanted]
    ).rowcount
    snapshots.prune(connection)
    return deleted


def decode_all(
    rows: list[Row], known: Mapping[str, str], report: Callable[[str], None]
) -> list[Entry]:
    """The entries of the rows that are valid, given the snapshots; each other one is reported."""
    entries = []
    for row in rows:
        try:
            entry = decode(row)
            snapshots.require(entry[1].flags, known)
            entries.append(entry)
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


def _wanted(key: Key | None, **columns: str | None) -> list[tuple[str, str]]:
    """The columns that are given, with what they have to hold."""
    wanted: list[tuple[str, str]] = list(zip(KEY_COLUMNS, _values(key), strict=True)) if key else []
    return wanted + [(name, value) for name, value in columns.items() if value is not None]


def _values(item: Key | Measurement) -> tuple[Any, ...]:
    return tuple(getattr(item, field.name) for field in dataclasses.fields(item))


def _equal(names: Iterable[str]) -> str:
    return " AND ".join(f"{name} = ?" for name in names)


def _checksum(values: Sequence[object]) -> int:
    """The sum over all values but an empty digest, so that rows from before flags keep theirs."""
    text = "\x1f".join(map(repr, values if values[_FLAGS] else values[:_FLAGS]))
    return zlib.crc32(text.encode("utf-8", "backslashreplace"))
