"""The SQL of the tuning table's file: its parts, and how an older file becomes one of ours.

The statements are compared letter by letter with those in a file, so they are written out in full
and never produced by `ALTER TABLE`, whose wording is SQLite's own.
"""

from __future__ import annotations

import sqlite3

APPLICATION_ID = 0x504C5954  # "PLYT"
SCHEMA_VERSION = 2

_META_SQL = "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"
# One b-tree and no second index: nothing in the file can disagree with the rows themselves.
_MEASUREMENTS_SQL = """CREATE TABLE measurements (
    device TEXT NOT NULL, versions TEXT NOT NULL, problem TEXT NOT NULL,
    backend TEXT NOT NULL, config TEXT NOT NULL,
    median_s REAL NOT NULL, min_s REAL NOT NULL, max_s REAL NOT NULL, repeats INTEGER NOT NULL,
    error REAL NOT NULL, tolerance REAL NOT NULL, verified INTEGER NOT NULL,
    measured_at TEXT NOT NULL, flags TEXT NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (device, versions, problem, backend, config)
) WITHOUT ROWID"""
_MEASUREMENTS_1_SQL = _MEASUREMENTS_SQL.replace("flags TEXT NOT NULL, ", "")
_FLAGS_SQL = "CREATE TABLE flags (digest TEXT PRIMARY KEY, snapshot TEXT NOT NULL) WITHOUT ROWID"

SCHEMAS = {
    1: {"meta": _META_SQL, "measurements": _MEASUREMENTS_1_SQL},
    2: {"meta": _META_SQL, "measurements": _MEASUREMENTS_SQL, "flags": _FLAGS_SQL},
}
"""The tables of each schema that can be read, by its version."""

_COLUMNS_1 = (
    "device, versions, problem, backend, config, median_s, min_s, max_s, repeats, error, "
    "tolerance, verified, measured_at, checksum"
)


def create_schema(connection: sqlite3.Connection) -> None:
    """Make the tables of an empty database; the caller holds the transaction."""
    for statement in SCHEMAS[SCHEMA_VERSION].values():
        connection.execute(statement)
    meta = [("application", "polyattn tuning table"), ("schema", str(SCHEMA_VERSION))]
    connection.executemany("INSERT INTO meta (name, value) VALUES (?, ?)", meta)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def upgrade(connection: sqlite3.Connection) -> None:
    """Bring a whole table of schema 1 to this one; the caller holds the transaction.

    The rows are copied inside SQLite, bit by bit, with an empty digest: which flags were in force
    was not recorded. Their checksums stay right, because that of a row without flags leaves the
    column out; a row that was damaged stays damaged, and is reported as before.
    """
    connection.execute("CREATE TABLE moving AS SELECT * FROM measurements")
    connection.execute("DROP TABLE measurements")
    connection.execute(_MEASUREMENTS_SQL)
    connection.execute(_FLAGS_SQL)
    connection.execute(
        f"INSERT INTO measurements ({_COLUMNS_1}, flags) SELECT {_COLUMNS_1}, '' FROM moving"
    )
    connection.execute("DROP TABLE moving")
    connection.execute(f"UPDATE meta SET value = '{SCHEMA_VERSION}' WHERE name = 'schema'")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
