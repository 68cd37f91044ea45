"""Tables that were written before rows said under which flags they were measured: schema 1."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import zlib
from contextlib import closing

import pytest

from polyattn.errors import TuningError
from polyattn.tuning import FILE_NAME, Key, Measurement, TuningTable, database, digest

# The words of the version that wrote such files.
SCHEMA_1 = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE measurements (
    device TEXT NOT NULL, versions TEXT NOT NULL, problem TEXT NOT NULL,
    backend TEXT NOT NULL, config TEXT NOT NULL,
    median_s REAL NOT NULL, min_s REAL NOT NULL, max_s REAL NOT NULL, repeats INTEGER NOT NULL,
    error REAL NOT NULL, tolerance REAL NOT NULL, verified INTEGER NOT NULL,
    measured_at TEXT NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (device, versions, problem, backend, config)
) WITHOUT ROWID""",
    "INSERT INTO meta VALUES ('application', 'polyattn tuning table'), ('schema', '1')",
    f"PRAGMA application_id = {0x504C5954}",
    "PRAGMA user_version = 1",
)
KEY = Key("cpu:test 2 threads", "polyattn=0.1.0 torch=2.13.0", '{"T":128}')
NEW = Measurement("new", "{}", 2e-5, 1e-5, 3e-5, 20, 0.0, 1e-6, True)
SNAPSHOT = {"threads": 2}
PLACES = 9  # statements of the migration, the commit included


def make_old(path, count=5, key=KEY):
    """Write a file of schema 1; return its entries as they must be read from now on."""
    times = [1e-5 * (number + 1) for number in range(count)]
    rows = [
        (
            key.device,
            key.versions,
            key.problem,
            f"backend_{n:05}",
            '{"b":1}',
            t,
            t / 2,
            t * 2,
            20,
            1e-7,
            1e-6,
            1,
            "2026-01-31T12:00:00+00:00",
        )
        for n, t in enumerate(times)
    ]
    path.parent.mkdir(exist_ok=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in SCHEMA_1:
            connection.execute(statement)
        summed = [(*row, zlib.crc32("\x1f".join(map(repr, row)).encode())) for row in rows]
        connection.executemany(f"INSERT INTO measurements VALUES ({'?,' * 13}?)", summed)
    return [(key, Measurement(*row[3:11], bool(row[11]), row[12])) for row in rows]


def inside(path):
    """The version of a file, what it is made of, and all of its rows as they are."""
    with closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        schema = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE sql NOT NULL"))
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        if "meta" in schema:
            schema["said"] = connection.execute("SELECT * FROM meta ORDER BY name").fetchall()
        connection.text_factory = bytes
        return version, schema, connection.execute("SELECT * FROM measurements").fetchall()


def edit(path, *statements):
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / FILE_NAME


@pytest.fixture
def old(path):
    return make_old(path)


@pytest.mark.parametrize("first", ["rows", "best", "record", "forget", "generation", "flags"])
def test_every_row_is_kept_and_says_that_nothing_was_recorded(path, old, first):
    before = [row[:13] for row in inside(path)[2]]
    with TuningTable(path) as table:
        if first == "record":
            table.record(KEY, [NEW], SNAPSHOT)
            assert table.forget(backend="new") == 1
        elif first == "forget":
            assert table.forget(backend="missing") == 0
        elif first == "best":
            assert table.best(KEY) == [one for _, one in old]
        else:
            getattr(table, first)() if first != "generation" else table.generation
        assert table.rows() == old
        assert {one.flags for _, one in table.rows()} == {""}
        assert (table.flags(), table.notices, table.persistent) == ({}, [], True)
    version, schema, rows = inside(path)
    assert (version, [row[:13] for row in rows]) == (2, before)
    with TuningTable(path.with_name("fresh")) as fresh:
        fresh.record(KEY, [NEW])
    assert schema == inside(path.with_name("fresh"))[1]
    assert not list(path.parent.glob("*.corrupt-*"))


def test_a_migrated_table_takes_new_rows_and_stays(path, old):
    with TuningTable(path) as table:
        table.record(KEY, [NEW], SNAPSHOT)
    with TuningTable(path) as table:
        assert {one.backend: one.flags for _, one in table.rows()} == {
            one.backend: "" for _, one in old
        } | {"new": digest(SNAPSHOT)}
        assert table.notices == []


def test_a_damaged_row_is_kept_as_it_is_and_reported_as_before(path, old):
    edit(
        path,
        "UPDATE measurements SET median_s = median_s / 2 WHERE backend = 'backend_00001'",
        "UPDATE measurements SET config = CAST(x'ff' AS TEXT) WHERE backend = 'backend_00002'",
        "UPDATE measurements SET median_s = 'fast' WHERE backend = 'backend_00003'",
    )
    before = [row[:13] for row in inside(path)[2]]
    with TuningTable(path) as table:
        assert table.rows() == [old[0], old[4]]
        assert [text.split("'")[1] for text in table.notices] == [
            "backend_00001",
            "backend_00002",
            "backend_00003",
        ]
    assert [row[:13] for row in inside(path)[2]] == before


@pytest.mark.parametrize(
    "damage",
    ["DROP TABLE meta", "CREATE INDEX i ON measurements (backend)", "CREATE TABLE flags (x)"],
)
def test_an_old_file_that_is_not_whole_is_moved_aside(path, old, damage):
    edit(path, damage)
    with TuningTable(path) as table:
        assert table.rows() == []
        assert "moved to" in table.notices[0]
    assert inside(path.with_name(FILE_NAME + ".corrupt-1"))[0] == 1


def test_an_old_file_put_in_the_place_of_an_open_one(path, tmp_path):
    old = make_old(tmp_path / "saved")
    path.parent.mkdir()
    with TuningTable(path) as table:
        table.record(KEY, [NEW])
        (tmp_path / "saved").replace(path)
        assert table.rows() == old
        assert table.persistent


# Out of reach ------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["lock", "connect", "full"])
@pytest.mark.parametrize("writing", [False, True])
def test_an_old_file_that_cannot_be_written_still_gives_its_times(
    path, old, monkeypatch, step, writing
):
    before = path.read_bytes()
    real = sqlite3.connect

    def refused(*_, **__):
        error = OSError(30, "Read-only file system")
        if step == "full":
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    if step == "connect":
        monkeypatch.setattr(
            sqlite3, "connect", lambda name, **how: real(name.replace("mode=rw", "mode=ro"), **how)
        )
    else:
        name = "storage.file_lock" if step == "lock" else "database.upgrade"
        monkeypatch.setattr(f"polyattn.tuning.{name}", refused)
    with TuningTable(path) as table:
        if writing:
            table.record(KEY, [NEW], SNAPSHOT)
            assert table.forget(backend="new") == 1
        assert table.rows() == old
        assert not table.persistent
        assert len(table.notices) == 1
        why = "cannot be written" if writing and step == "lock" else "and cannot be brought to this"
        assert why in table.notices[0]
    assert path.read_bytes() == before


def test_an_old_file_that_another_program_holds(path, old):
    with TuningTable(path, busy_timeout_s=0.1) as table:
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(TuningError, match="got no lock"):
            table.record(KEY, [NEW])
        assert table.rows() == old  # of the old file, in memory
        assert not table.persistent
        holder.execute("ROLLBACK")
        holder.close()
    with TuningTable(path) as table:
        assert table.rows() == old
        assert table.persistent


# Interrupted, and at once ------------------------------------------------------------------------


class Stopping:
    """A connection that stops before one of its statements."""

    def __init__(self, connection, place, stop):
        self.connection, self.left, self.stop = connection, place, stop

    def execute(self, statement, *values):
        if self.left == 0:
            self.stop()
        self.left -= 1
        return self.connection.execute(statement, *values)


def stop_at(place, stop):
    """An `upgrade` that stops before its statement `place`, or after its last one."""
    from polyattn.tuning.schema import upgrade

    def stopping(connection):
        watched = Stopping(connection, place, stop)
        upgrade(watched)
        assert watched.left == place - (PLACES - 1)  # else PLACES is not their number
        stop()

    return stopping


@pytest.mark.parametrize("place", range(PLACES))
def test_an_interrupt_leaves_the_old_file_whole(path, old, monkeypatch, place):
    before = inside(path)

    def stop():
        raise KeyboardInterrupt

    with TuningTable(path) as table:
        with monkeypatch.context() as patched:
            patched.setattr(database, "upgrade", stop_at(place, stop))
            with pytest.raises(KeyboardInterrupt):
                table.rows()
        assert inside(path) == before
        assert table.rows() == old
        assert table.notices == []


def test_who_comes_second_finds_the_work_done(path, old):
    with TuningTable(path) as table:
        table.record(KEY, [NEW], SNAPSHOT)
        before = path.read_bytes()
        database.upgrade_if_older(path, 1.0)
        assert path.read_bytes() == before
        assert len(table.rows()) == len(old) + 1


KILLED = textwrap.dedent(
    """
    import os, signal, sys
    sys.path.insert(0, sys.argv[3])
    from test_migration import stop_at
    from polyattn.tuning import TuningTable, database

    place = int(sys.argv[2])
    database.upgrade = stop_at(place, lambda: os.kill(os.getpid(), signal.SIGKILL))
    TuningTable(sys.argv[1]).rows()
    """
)


def start(code, *arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.parametrize("place", [1, 5, 6, PLACES - 1])
def test_a_kill_leaves_the_old_file_whole(path, place):
    old = make_old(path, 20_000)  # more than SQLite's cache: pages are written before the commit
    killed = start(KILLED, path, place, os.path.dirname(__file__))
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    with TuningTable(path) as table:
        assert table.rows() == old
        assert table.persistent
        assert table.notices == []


OPENER = textwrap.dedent(
    """
    import sys
    from polyattn.tuning import Key, Measurement, TuningTable

    path, name = sys.argv[1:]
    key = Key("cpu:test 2 threads", "polyattn=0.1.0 torch=2.13.0", '{"T":128}')
    table = TuningTable(path)
    print("ready", flush=True)
    sys.stdin.readline()
    if name != "reader":
        one = Measurement(name, "{}", 2e-5, 1e-5, 3e-5, 20, 0.0, 1e-6, True)
        table.record(key, [one], {"name": name})
    print(len(table.rows()), flush=True)
    assert table.persistent
    assert table.notices == [], table.notices
    """
)


@pytest.mark.parametrize("names", [("a", "b"), ("reader", "a"), ("a", "b", "reader", "reader")])
def test_processes_that_find_an_old_file_at_once_lose_nothing(path, names):
    old = make_old(path, 3000)
    openers = [start(OPENER, path, name) for name in names]
    for opener in openers:
        assert opener.stdout.readline() == "ready\n"
    for opener in openers:
        opener.stdin.write("go\n")
        opener.stdin.flush()
    for opener in openers:
        counted, _ = opener.communicate()
        assert opener.returncode == 0
        assert int(counted) >= 3000
    written = [name for name in names if name != "reader"]
    with TuningTable(path) as table:
        assert [entry for entry in table.rows() if not entry[1].flags] == old
        assert len(table.rows()) == 3000 + len(written)
        assert sorted(one["name"] for one in table.flags().values()) == written
    assert not list(path.parent.glob("*.corrupt-*"))


# Taken from elsewhere ----------------------------------------------------------------------------


def test_merge_takes_an_old_table_and_leaves_it_as_it_is(path, tmp_path):
    old = make_old(tmp_path / "other")
    before = (tmp_path / "other").read_bytes()
    path.parent.mkdir()
    with TuningTable(path) as table:
        assert table.merge(tmp_path / "other") == 5
        assert table.merge(tmp_path / "other") == 0
        assert table.rows() == old
    assert (tmp_path / "other").read_bytes() == before


def old_export(**changes):
    row = {
        "device": "cpu:test 2 threads", "versions": "polyattn=0.1.0 torch=2.13.0",
        "problem": '{"T":128}', "backend": "sdpa_flash", "config": "{}", "median_s": 2e-05,
        "min_s": 1e-05, "max_s": 3e-05, "repeats": 20, "error": "inf", "tolerance": 1e-06,
        "verified": False, "measured_at": "2026-01-31T12:00:00+00:00",
    }  # fmt: skip
    return {"application": "polyattn-tuning", "schema": 1, "rows": [row | changes]}


def test_an_export_of_an_old_table_is_taken(path, tmp_path):
    file = tmp_path / "old.json"
    file.write_text(json.dumps(old_export()))
    with TuningTable(path) as table:
        assert table.import_json(file) == 1
        ((key, one),) = table.rows()
        assert (key, one.backend, one.median_s, one.flags) == (KEY, "sdpa_flash", 2e-5, "")


@pytest.mark.parametrize(
    "document",
    [
        old_export(flags=""),
        old_export(flags=digest(SNAPSHOT)),
        old_export() | {"flags": {}},
        old_export() | {"schema": 2},
        old_export() | {"schema": 1.0},
    ],
)
def test_an_old_export_with_something_new_in_it_is_refused(path, tmp_path, document):
    file = tmp_path / "old.json"
    file.write_text(json.dumps(document))
    with TuningTable(path) as table:
        with pytest.raises(TuningError, match=r"got .*expected .*; .+"):
            table.import_json(file)
        assert table.rows() == []
