"""The tuning table: what it keeps, what it refuses, and what it survives."""

import dataclasses
import io
import json
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyattn.errors import TuningError
from polyattn.tuning import FILE_NAME, Key, Measurement, TuningTable, digest

KEY = Key("cpu:test 2 threads", "polyattn=0.1.0 torch=2.13.0", '{"T":128}')
SNAPSHOT = {"a": True, "polyattn.flags": {"schema": 1, "framework": "torch", "unreadable": {}}}
DIGEST = digest(SNAPSHOT)
OTHER_KEY = Key("cuda:test", "polyattn=0.1.0 torch=2.13.0", '{"T":128}')


def measured(backend="sdpa_flash", median=2e-5, **changes):
    fields = {
        "backend": backend,
        "config": "{}",
        "median_s": median,
        "min_s": median / 2,
        "max_s": median * 2,
        "repeats": 20,
        "error": 1e-7,
        "tolerance": 1e-6,
        "verified": True,
        "measured_at": "2026-01-31T12:00:00+00:00",
    }
    return Measurement(**(fields | changes))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / FILE_NAME


@pytest.fixture
def table(path):
    with TuningTable(path) as table:
        yield table


@pytest.fixture
def filled(path):
    """The path of a file of several pages, its entries known."""
    path.parent.mkdir()
    with TuningTable(path) as table:
        many = [measured(f"backend_{i}", 1e-5 * (i + 1)) for i in range(60)]
        table.record(KEY, many[:30])
        table.record(KEY, many[30:], SNAPSHOT)
        entries = table.rows()
    return path, entries


# Values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": ""},
        {"backend": 3},
        {"backend": "a\0b"},
        {"backend": "\ud800"},
        {"config": "{"},
        {"config": '{"a": NaN}'},
        {"config": '{"a": 1e999}'},
        {"config": '{"a": 1, "a": 2}'},
        {"config": "[" * 100_000},
        {"config": "[1]"},
        {"config": "3"},
        {"config": '"compile"'},
        {"config": {}},
        {"median_s": 0.0},
        {"median_s": -1.0},
        {"median_s": math.nan},
        {"median_s": math.inf},
        {"median_s": "1"},
        {"median_s": True},
        {"median_s": 10**400},
        {"min_s": 1.0},
        {"max_s": 1e-9},
        {"repeats": 0},
        {"repeats": 2**40},
        {"repeats": 1.0},
        {"repeats": True},
        {"error": -1.0},
        {"error": math.nan},
        {"error": math.inf},
        {"error": 1.0},
        {"error": math.nan, "verified": False},
        {"tolerance": math.inf},
        {"verified": 1},
        {"flags": None},
        {"flags": "a digest"},
        {"flags": "AB" * 32},
        {"flags": "ab" * 32 + "\n"},
        {"measured_at": "yesterday"},
        {"measured_at": "2026-01-31T12:00:00"},
        {"measured_at": "2026-01-31T12:00:00+02:00"},
    ],
)
def test_measurement_refuses(changes):
    with pytest.raises(TuningError, match=r"got .*expected .*; .+"):
        measured(**changes)


@pytest.mark.parametrize("values", [("", "v", "p"), ("d", None, "p"), ("d", "v", "\0")])
def test_key_refuses(values):
    with pytest.raises(TuningError, match=r"got .*expected .*; .+"):
        Key(*values)


def test_measured_at_is_now_by_default():
    changes = dataclasses.asdict(measured())
    del changes["measured_at"]
    assert Measurement(**changes).measured_at.endswith("+00:00")


# What it keeps -----------------------------------------------------------------------------------


def test_nothing_touches_the_disk_before_the_first_record(path, tmp_path):
    with TuningTable.open(path) as table:
        assert table.best(KEY) == []
        assert table.rows() == table.keys() == table.notices == []
        assert table.forget() == 0
        assert table.record(KEY, []) == 0
        assert table.persistent
        assert isinstance(table.generation, int)
        assert table.export_json(io.StringIO()) == 0
    assert list(tmp_path.iterdir()) == []


def test_best_is_verified_and_fastest_first(table):
    broken = measured("broken", 1e-9, verified=False, error=math.inf)
    slow, fast = measured("slow", 3e-5), measured("fast", 1e-5)
    assert table.record(KEY, [slow, broken, fast]) == 3
    assert table.best(KEY) == [fast, slow]
    assert table.best(OTHER_KEY) == []
    assert {measurement.backend for _, measurement in table.rows()} == {"slow", "fast", "broken"}
    assert table.keys() == [KEY]


def test_record_replaces_the_same_config_and_keeps_others(path, table):
    blocks = measured(config='{"block": 64}')
    table.record(KEY, [measured(), blocks])
    table.record(KEY, [measured(median=9e-5, measured_at="2020-01-01T00:00:00Z")])
    with TuningTable(path) as again:
        assert [found.median_s for found in again.best(KEY)] == [2e-5, 9e-5]
        assert again.best(KEY)[0] == blocks


def test_record_is_all_or_nothing(table):
    def stop():
        yield measured()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table.record(KEY, stop())
    with pytest.raises(TuningError):
        table.record(KEY, [measured(), "not a measurement"])
    with pytest.raises(TuningError):
        table.record("not a key", [measured()])
    assert table.rows() == []


def test_forget_matches_everything_given(table):
    table.record(KEY, [measured("a"), measured("b")])
    table.record(OTHER_KEY, [measured("a"), measured("b")])
    assert table.forget(device=KEY.device, backend="a") == 1
    assert table.forget(key=OTHER_KEY, backend="missing") == 0
    assert table.forget(backend="a") == 1
    assert table.forget(key=OTHER_KEY) == 1
    assert table.forget() == 1
    assert table.rows() == []


def test_use_after_close_is_an_error(table):
    table.close()
    table.close()
    with pytest.raises(TuningError, match="after close"):
        table.best(KEY)


@pytest.mark.parametrize("wrong", ["", "a\0b", b"bytes"])
def test_path_is_checked(wrong):
    with pytest.raises(TuningError, match=r"got .*expected"):
        TuningTable(wrong)


@given(
    texts=st.lists(st.text(min_size=1).filter(str.strip), min_size=5, max_size=5),
    numbers=st.lists(st.floats(1e-300, 1e300), min_size=3, max_size=3).map(sorted),
    error=st.floats(0.0, 1e300) | st.just(math.inf) | st.just(-0.0),
)
def test_any_valid_entry_comes_back_equal(tmp_path_factory, texts, numbers, error):
    try:
        key = Key(*texts[:3])
        one = measured(
            texts[3],
            config=json.dumps({"text": texts[4]}),
            min_s=numbers[0],
            median_s=numbers[1],
            max_s=numbers[2],
            error=error,
            verified=False,
        )
    except TuningError:
        return
    path = tmp_path_factory.mktemp("any") / FILE_NAME
    with TuningTable(path) as table:
        table.record(key, [one])
        exported = io.StringIO()
        table.export_json(exported)
        assert table.rows() == [(key, one)]
    with TuningTable(path) as table, TuningTable(path.with_name("copy")) as copy:
        assert table.rows() == [(key, one)]
        assert copy.import_json(io.StringIO(exported.getvalue())) == 1
        assert copy.rows() == [(key, one)]
        assert table.notices == copy.notices == []


# Generation --------------------------------------------------------------------------------------


def test_generation_changes_with_the_table_only(path, table):
    seen = [table.generation]
    table.record(KEY, [measured()])
    seen.append(table.generation)
    table.best(KEY)
    assert table.generation == seen[-1]
    with TuningTable(path) as other:
        other.best(KEY)
        assert table.generation == seen[-1]
        other.record(KEY, [measured("other")])
        seen.append(table.generation)
        other.forget()
        seen.append(table.generation)
    assert table.generation == seen[-1]
    path.unlink()
    seen.append(table.generation)
    assert len(set(seen)) == len(seen)


def test_generation_sees_a_file_that_appears(path):
    with TuningTable(path) as early, TuningTable(path) as late:
        before = early.generation
        late.record(KEY, [measured()])
        assert early.generation != before
        assert early.best(KEY) == [measured()]


# Export, import, merge ---------------------------------------------------------------------------


def test_export_and_import_through_a_path(filled, tmp_path):
    path, entries = filled
    exported = tmp_path / "times.json"
    with TuningTable(path) as table, TuningTable(tmp_path / "new.sqlite3") as new:
        assert table.export_json(exported) == 60
        assert new.import_json(exported) == 60
        assert new.import_json(exported) == 0
        assert new.rows() == entries
        with open(exported, "rb") as file:
            new.forget()
            assert new.import_json(file) == 60
        for step in (table.export_json, table.import_json):
            with pytest.raises(TuningError, match="not the table itself"):
                step(path)
        assert table.rows() == entries
    assert sorted(child.name for child in tmp_path.iterdir()) == [
        "cache",
        "new.sqlite3",
        "new.sqlite3.lock",
        "times.json",
    ]


def test_newer_wins_in_import_and_merge(tmp_path):
    old = measured(median=1e-5, measured_at="2025-01-01T00:00:00Z")
    new = measured(median=9e-5, measured_at="2026-01-01T00:00:00+00:00")
    with TuningTable(tmp_path / "old") as first, TuningTable(tmp_path / "new") as second:
        first.record(KEY, [old])
        second.record(KEY, [new])
        assert second.merge(first.path) == 0
        assert second.best(KEY) == [new]
        assert first.merge(second.path) == 1
        assert first.best(KEY) == [new]
        assert first.merge(first.path) == 0


def export_of(**row_changes):
    row = {**dataclasses.asdict(KEY), **dataclasses.asdict(measured(flags=DIGEST))}
    return {
        "application": "polyattn-tuning",
        "schema": 2,
        "flags": {DIGEST: SNAPSHOT},
        "rows": [row, row | row_changes],
    }


def without(name):
    document = export_of()
    del document["rows"][1][name]
    return document


@pytest.mark.parametrize(
    "document",
    [
        "",
        "{",
        "null",
        export_of(flags="0" * 64),
        export_of(flags=DIGEST.upper()),
        export_of(flags=None),
        export_of() | {"flags": {}},
        export_of() | {"flags": []},
        export_of() | {"flags": {DIGEST: None}},
        export_of() | {"flags": {DIGEST: [1]}},
        export_of() | {"flags": {DIGEST: SNAPSHOT | {"a": False}}},
        export_of() | {"flags": {DIGEST: SNAPSHOT, "0" * 64: SNAPSHOT}},
        without("flags"),
        {name: value for name, value in export_of().items() if name != "flags"},
        "[]",
        "[" * 100_000,
        b"\xff\xfe",
        b"\x80\x04\x95.",
        '{"application": NaN}',
        {},
        export_of() | {"application": "other"},
        export_of() | {"schema": 3},
        export_of() | {"schema": 1},
        export_of() | {"schema": "1"},
        export_of() | {"schema": True},
        export_of() | {"extra": 1},
        export_of() | {"rows": {}},
        export_of() | {"rows": [3]},
        without("median_s"),
        without("device"),
        export_of(extra=1),
        export_of(median_s=-1.0),
        export_of(median_s="fast"),
        export_of(median_s=None),
        export_of(error="inf"),
        export_of(verified=1),
        export_of(repeats=1.5),
        export_of(config="{"),
        export_of(measured_at="soon"),
        export_of(device=7),
        json.dumps(export_of()).replace('"schema": 2', '"schema": 2, "schema": 2'),
        json.dumps(export_of()).replace("2e-05", "1e999"),
        json.dumps(export_of()).replace("2e-05", "9" * 5000),
    ],
)
def test_import_refuses_whole(table, tmp_path, document):
    file = tmp_path / "import.json"
    text = json.dumps(document) if isinstance(document, dict) else document
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(TuningError, match=r"got .*expected .*; .+"):
        table.import_json(file)
    assert table.rows() == []
    assert not table.path.exists()


def test_import_takes_what_the_refused_documents_were_made_from(table):
    assert table.import_json(io.StringIO(json.dumps(export_of()))) == 1
    assert table.rows() == [(KEY, measured(flags=DIGEST))]
    assert table.flags() == {DIGEST: SNAPSHOT}


def test_import_and_export_name_a_path_that_does_not_work(table, tmp_path):
    with pytest.raises(TuningError, match=r"got .*expected"):
        table.import_json(tmp_path / "missing.json")
    with pytest.raises(TuningError, match=r"got .*expected"):
        table.import_json(tmp_path)
    with pytest.raises(TuningError, match=r"got .*expected"):
        table.export_json(tmp_path / "missing" / "file.json")


def test_merge_refuses_what_is_not_a_table(table, tmp_path):
    table.record(KEY, [measured()])
    foreign, newer, noise = tmp_path / "foreign", tmp_path / "newer", tmp_path / "noise"
    make_database(foreign, "CREATE TABLE t (x)")
    make_newer(newer)
    noise.write_bytes(os.urandom(5000))
    before = {file: file.read_bytes() for file in (foreign, newer, noise)}
    for other in (*before, tmp_path / "missing", tmp_path):
        with pytest.raises(TuningError, match=r"got .*expected .*; .+"):
            table.merge(other)
    assert {file: file.read_bytes() for file in before} == before
    assert not (tmp_path / "missing").exists()
    assert table.rows() == [(KEY, measured())]


# Damage ------------------------------------------------------------------------------------------


def make_database(path, *statements):
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def make_newer(path):
    with TuningTable(path) as table:
        table.record(KEY, [measured()])
    make_database(path, "PRAGMA user_version = 3")


def asides(path):
    return sorted(path.parent.glob(f"{FILE_NAME}.corrupt-*"))


def check_rebuilt(path):
    with TuningTable(path) as table:
        assert table.best(KEY) == []
        assert "moved to" in table.notices[0]
        assert table.persistent
        table.record(KEY, [measured()])
    with TuningTable(path) as table:
        assert table.rows() == [(KEY, measured())]
        assert table.notices == []


@pytest.mark.parametrize("size", [2, 15, 100, 511, 4096, 40_000])
def test_noise_is_moved_aside(path, size):
    path.parent.mkdir()
    noise = random.Random(size).randbytes(size)
    for number in (1, 2):
        path.write_bytes(noise)
        check_rebuilt(path)
        assert asides(path)[number - 1].read_bytes() == noise


@pytest.mark.parametrize("kept", [2, 100, 4095, 4096, 5000, 8192])
def test_truncated_is_moved_aside(filled, kept):
    path, _ = filled
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    check_rebuilt(path)
    assert asides(path)[0].read_bytes() == whole[:kept]


@pytest.mark.parametrize("kept", [1, -1, -40, -4000])
def test_a_cut_that_sqlite_does_not_see_gives_no_wrong_time(filled, kept):
    path, entries = filled
    path.write_bytes(path.read_bytes()[:kept])
    with TuningTable(path) as table:
        assert set(table.rows()) < set(entries)
        table.record(OTHER_KEY, [measured()])
        assert table.best(OTHER_KEY) == [measured()]


def test_the_journal_of_a_damaged_file_goes_with_it(path):
    path.parent.mkdir()
    path.write_bytes(b"noise" * 1000)
    journal = path.with_name(path.name + "-journal")
    journal.write_bytes(b"old journal")
    check_rebuilt(path)
    assert not journal.exists()


def test_an_empty_file_is_filled(path):
    path.parent.mkdir()
    path.touch()
    with TuningTable(path) as table:
        assert table.best(KEY) == []
        assert path.stat().st_size == 0
        table.record(KEY, [measured()])
        assert table.notices == asides(path) == []
    with TuningTable(path) as table:
        assert table.best(KEY) == [measured()]


@pytest.mark.parametrize("seed", range(60))
def test_flipped_bytes_never_give_a_wrong_time(filled, seed):
    path, entries = filled
    rng = random.Random(seed)
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 3, 30])):
        # The first pages hold the header and the schema, where a flip does most harm.
        end = rng.choice([100, 4096, len(content)])
        content[rng.randrange(end)] = rng.randrange(256)
    path.write_bytes(content)
    with TuningTable(path) as table:
        found = table.rows()
        assert set(found) <= set(entries)
        assert {one.backend for one in table.best(KEY)} <= {one.backend for _, one in entries}
        if len(found) < len(entries):
            assert table.notices
        table.record(OTHER_KEY, [measured()])
        assert table.best(OTHER_KEY) == [measured()]
        assert set(table.rows()) <= {*entries, (OTHER_KEY, measured())}


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(os.urandom(9000)),
        lambda path: os.truncate(path, 4096),
        lambda path: os.truncate(path, 100),
        lambda path: make_database(path, "DROP TABLE measurements"),
        lambda path: path.unlink(),
        lambda path: path.rename(path.with_name("elsewhere")),
    ],
)
@pytest.mark.parametrize("first", ["read", "write", "generation"])
def test_damage_under_an_open_table(filled, damage, first):
    path, entries = filled
    with TuningTable(path) as table:
        assert table.rows() == entries
        before = table.generation
        damage(path)
        if first == "read":
            assert table.best(KEY) == []
        elif first == "generation":
            assert table.generation != before
        table.record(OTHER_KEY, [measured()])
        assert table.generation != before
        assert table.rows() == [(OTHER_KEY, measured())]
        assert table.persistent
    with TuningTable(path) as table:
        assert table.rows() == [(OTHER_KEY, measured())]


@pytest.mark.parametrize(
    "edit",
    [
        "median_s = -1.0",
        "median_s = 9e999",
        "median_s = 'fast'",
        "median_s = x'00'",
        "median_s = median_s / 2",
        "repeats = 'many'",
        "verified = 7",
        "config = '{'",
        "config = '[1]'",
        "config = CAST(x'ff' AS TEXT)",
        "backend = ''",
        "backend = 'another'",
        "measured_at = 'soon'",
        "checksum = NULL",
    ],
)
def test_edited_rows_are_ignored_with_a_notice(path, table, edit):
    table.record(KEY, [measured("edited"), measured("kept")])
    script = "PRAGMA ignore_check_constraints = ON"
    make_database(
        path, script, f"UPDATE OR IGNORE measurements SET {edit} WHERE backend = 'edited'"
    )
    if edit == "checksum = NULL":
        make_database(path, "UPDATE measurements SET checksum = 1 WHERE backend = 'edited'")
    for _ in range(2):
        assert table.best(KEY) == [measured("kept")]
        assert table.rows() == [(KEY, measured("kept"))]
    assert len(table.notices) == 1
    assert "ignored" in table.notices[0]
    table.record(KEY, [measured("edited")])
    assert measured("edited") in table.best(KEY)


def test_merge_leaves_out_edited_rows(table, tmp_path):
    other = tmp_path / "other"
    with TuningTable(other) as source:
        source.record(KEY, [measured("edited"), measured("kept")])
    make_database(other, "UPDATE measurements SET median_s = 1e-9 WHERE backend = 'edited'")
    assert table.merge(other) == 1
    assert table.rows() == [(KEY, measured("kept"))]
    assert "merge of" in table.notices[0]


# Not ours, or out of reach -----------------------------------------------------------------------


def check_memory(path, known=()):
    """The table works, only in memory, and says so."""
    with TuningTable(path, busy_timeout_s=0.2) as table:
        table.record(OTHER_KEY, [measured("new")])
        assert table.best(OTHER_KEY) == [measured("new")]
        assert table.best(KEY) == list(known)
        assert not table.persistent
        assert len(table.notices) == 1
        assert "in memory" in table.notices[0]
        before = table.generation
        assert table.forget() == 1 + len(known)
        assert table.generation != before


@pytest.mark.parametrize(
    "make",
    [
        lambda path: make_database(path, "CREATE TABLE t (x)"),
        lambda path: make_database(path, "PRAGMA application_id = 7"),
        lambda path: make_database(path, "PRAGMA user_version = 1"),
        make_newer,
    ],
)
def test_a_foreign_or_newer_database_is_left_alone(path, make):
    path.parent.mkdir()
    make(path)
    before = path.read_bytes()
    check_memory(path)
    assert path.read_bytes() == before
    assert asides(path) == []


def test_a_table_that_a_viewer_has_analysed_is_no_damaged_one(filled):
    path, known = filled
    make_database(path, "ANALYZE")
    with TuningTable(path) as table:
        assert table.rows() == known
        assert table.persistent
    assert asides(path) == []


def test_a_file_that_becomes_foreign_is_left_alone(path, table):
    table.record(KEY, [measured()])
    make_database(path, "PRAGMA user_version = 3")
    before = path.read_bytes()
    table.record(KEY, [measured("b")])
    assert not table.persistent
    assert path.read_bytes() == before


def test_a_directory_in_its_place(path):
    path.mkdir(parents=True)
    check_memory(path)
    assert path.is_dir()


def test_a_pipe_in_its_place(path):
    path.parent.mkdir()
    os.mkfifo(path)
    check_memory(path)


def test_a_file_where_the_directory_should_be(path):
    path.parent.write_text("not a directory")
    check_memory(path)
    check_memory(path / "deeper" / FILE_NAME)


def test_a_link_to_itself(path):
    path.parent.mkdir()
    path.symlink_to(path)
    check_memory(path)


def test_a_link_to_the_table(path, tmp_path, table):
    table.record(KEY, [measured()])
    link = tmp_path / "link"
    link.symlink_to(path)
    with TuningTable(link) as linked:
        assert linked.record(KEY, [measured("b")]) == 1
    assert len(table.best(KEY)) == 2
    assert link.is_symlink()


@pytest.mark.parametrize("content", [b"", b"my notes\n", b"noise" * 5000], ids=len)
@pytest.mark.parametrize("first", ["read", "record"])
def test_what_a_link_leads_to_is_left_alone_unless_it_is_a_table(tmp_path, content, first):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    target, link = theirs / "notes.txt", tmp_path / FILE_NAME
    target.write_bytes(content)
    link.symlink_to(target)
    with TuningTable(link) as table:
        if first == "read":
            assert table.best(KEY) == []
        assert table.record(KEY, [measured()]) == 1
        assert table.best(KEY) == [measured()]
        assert not table.persistent
        assert [line for line in table.notices if "left alone" in line and "link" in line]
    assert target.read_bytes() == content
    assert list(theirs.iterdir()) == [target]
    assert link.is_symlink()


def test_a_table_behind_a_link_that_is_damaged_in_use_is_left_alone(tmp_path, path, table):
    table.record(KEY, [measured()])
    link = tmp_path / "link"
    link.symlink_to(path)
    with TuningTable(link) as linked:
        assert linked.best(KEY) == [measured()]
        path.write_bytes(b"noise" * 100)
        assert linked.record(KEY, [measured("b")]) == 1
        assert not linked.persistent and "left alone" in linked.notices[0]
    assert path.read_bytes() == b"noise" * 100
    assert asides(path) == [] and link.is_symlink()


def test_a_link_to_no_file_yet_makes_the_table_there(tmp_path):
    target, link = tmp_path / "shared" / "table", tmp_path / FILE_NAME
    link.symlink_to(target)
    with TuningTable(link) as table:
        table.record(KEY, [measured()])
        assert table.persistent
    with TuningTable(target) as table:
        assert table.best(KEY) == [measured()]
    assert link.is_symlink()


@pytest.mark.parametrize("step", ["mkdir", "lock", "connect"])
def test_a_read_only_directory_still_gives_its_times(path, monkeypatch, step):
    path.parent.mkdir()
    with TuningTable(path) as table:
        table.record(KEY, [measured()])

    def refused(*_, **__):
        raise OSError(30, "Read-only file system")

    if step == "mkdir":
        monkeypatch.setattr(Path, "mkdir", refused)
    elif step == "lock":
        monkeypatch.setattr("polyattn.tuning.storage.file_lock", refused)
    else:
        real = sqlite3.connect
        monkeypatch.setattr(
            sqlite3,
            "connect",
            lambda database, **how: real(database.replace("mode=rw", "mode=ro"), **how),
        )
    check_memory(path, known=[measured()])


@pytest.mark.parametrize("code", ["SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN"])
def test_a_full_or_failing_disk(path, monkeypatch, code):
    def failing(connection):
        error = sqlite3.OperationalError(code)
        error.sqlite_errorcode = getattr(sqlite3, code)
        raise error

    from polyattn.tuning import database

    real = database.create_schema
    monkeypatch.setattr("polyattn.tuning.storage.create_schema", failing)
    assert database.create_schema is real
    check_memory(path)


@pytest.mark.parametrize("code", ["SQLITE_CANTOPEN", "SQLITE_IOERR"])
def test_an_error_that_passes_is_tried_again(path, table, monkeypatch, code):
    table.record(KEY, [measured()])
    error = sqlite3.OperationalError(code)
    error.sqlite_errorcode = getattr(sqlite3, code)
    real, left = sqlite3.connect, [error, error]

    def sometimes(*args, **how):
        if left:
            raise left.pop()
        return real(*args, **how)

    monkeypatch.setattr(sqlite3, "connect", sometimes)
    with TuningTable(path) as again:
        assert again.best(KEY) == [measured()]
        assert again.persistent
        assert again.notices == left == []


def test_a_size_limit_hit_while_writing(path):
    table = TuningTable(path)
    table.record(KEY, [measured()])
    table._storage._connection.execute("PRAGMA max_page_count = 3")
    many = [measured(f"b{i}") for i in range(200)]
    assert table.record(KEY, many) == 200
    assert len(table.best(KEY)) == 201
    assert not table.persistent
    table.close()
    with TuningTable(path) as table:
        assert table.best(KEY) == [measured()]


def test_a_lock_that_is_never_given_back(path):
    with TuningTable(path, busy_timeout_s=0.1) as table:
        table.record(KEY, [measured()])
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(TuningError, match="got no lock"):
            table.record(KEY, [measured("b")])
        holder.execute("COMMIT")
        assert table.record(KEY, [measured("b")]) == 1
        holder.execute("BEGIN EXCLUSIVE")
        assert table.best(KEY) == []
        assert not table.persistent
        holder.close()


# Threads, forks, processes -----------------------------------------------------------------------


def test_threads_share_a_table(path):
    errors = []

    def work(number):
        try:
            for step in range(10):
                table.record(KEY, [measured(f"b{number}-{step}")])
                assert len(table.best(KEY)) > step
        except BaseException as error:
            errors.append(error)

    with TuningTable(path) as table:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(table.best(KEY)) == 40


def child_of(work):
    """Fork, run `work` in the child, return the child's exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_uses_its_own_connection(path):
    stop = threading.Event()

    def keep_writing():
        while not stop.is_set():
            table.record(KEY, [measured("thread")])

    with TuningTable(path) as table:
        table.record(KEY, [measured("parent")])
        writer = threading.Thread(target=keep_writing)
        writer.start()
        try:
            for number in range(10):
                backend = f"child{number}"
                assert child_of(lambda name=backend: table.record(KEY, [measured(name)])) == 0
        finally:
            stop.set()
            writer.join()
        assert len(table.best(KEY)) == 12
        assert table.notices == []


WRITER = textwrap.dedent(
    """
    import sys
    from polyattn.tuning import Key, Measurement, TuningTable

    path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    key = Key("cpu:test 2 threads", "polyattn=0.1.0 torch=2.13.0", '{"T":128}')
    table = TuningTable(path)
    for step in range(count):
        table.record(key, [
            Measurement(f"{name}-{step}-{part}", "{}", 2e-5, 1e-5, 3e-5, 20, 0.0, 1e-6, True)
            for part in range(4)
        ])
        print(step, flush=True)
    assert table.notices == [] or "moved to" in table.notices[0], table.notices
    """
)


def start_writer(path, name, count):
    command = [sys.executable, "-c", WRITER, str(path), name, str(count)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_processes_that_write_at_once_lose_nothing(path):
    writers = [start_writer(path, f"p{number}", 15) for number in range(4)]
    with TuningTable(path) as table:
        while any(writer.poll() is None for writer in writers):
            assert len(table.best(KEY)) % 4 == 0
        for writer in writers:
            assert writer.wait() == 0
            writer.stdout.close()
        assert len(table.best(KEY)) == 4 * 15 * 4
        assert table.notices == []


def test_processes_that_find_a_damaged_file_at_once_lose_nothing(path):
    path.parent.mkdir()
    path.write_bytes(b"noise" * 5000)
    writers = [start_writer(path, f"p{number}", 5) for number in range(4)]
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    with TuningTable(path) as table:
        assert len(table.best(KEY)) == 4 * 5 * 4
    assert len(asides(path)) == 1


def test_a_killed_writer_leaves_whole_records_only(path):
    rng = random.Random(0)
    done = 0
    for round_ in range(6):
        writer = start_writer(path, f"r{round_}", 10_000)
        writer.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(writer.pid, signal.SIGKILL)
        done += 1 + len(writer.stdout.readlines())
        writer.stdout.close()
        assert writer.wait() == -signal.SIGKILL
        with TuningTable(path) as table:
            found = len(table.best(KEY))
            # The write after the last that was reported may have been committed.
            assert found % 4 == 0
            assert 4 * done <= found <= 4 * (done + round_ + 1)
            assert table.notices == []
            assert table.record(KEY, [measured("after")]) == 1
            assert table.forget(backend="after") == 1


def test_the_core_needs_no_framework():
    code = (
        "import sys, polyattn.tuning, polyattn.partials; "
        "print([name for name in ('torch', 'jax', 'numpy') if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert shown.stdout == "[]\n"
