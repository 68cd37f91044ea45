"""Under which flags a time was measured: what the tuning table keeps of it, and for how long."""

import hashlib
import io
import json
import math
import sqlite3
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyattn.errors import TuningError
from polyattn.tuning import FILE_NAME, Key, Measurement, TuningTable, digest

KEY = Key("cpu:test 2 threads", "polyattn=0.1.0 torch=2.13.0", '{"T":128}')
OTHER_KEY = Key("cuda:test", "polyattn=0.1.0 torch=2.13.0", '{"T":128}')
ONE = {"cudnn.benchmark": False, "threads": 2, "order": [1, 2.5, None, "é\ud800"]}
TWO = {**ONE, "cudnn.benchmark": True}


def measured(backend="sdpa_flash", median=2e-5, at="2026-01-31T12:00:00Z", flags=""):
    return Measurement(
        backend, "{}", median, median / 2, median * 2, 20, 1e-7, 1e-6, True, at, flags
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / FILE_NAME


@pytest.fixture
def table(path):
    with TuningTable(path) as table:
        yield table


def edit(path, statement, *values):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, values)


def stored(path):
    """The digests in the file itself."""
    with closing(sqlite3.connect(path)) as connection:
        return {name for (name,) in connection.execute("SELECT digest FROM flags")}


def test_a_row_holds_the_digest_of_its_snapshot(path, table):
    table.record(KEY, [measured("a"), measured("b")], ONE)
    table.record(OTHER_KEY, [measured("a")], TWO)
    table.record(OTHER_KEY, [measured("b")])
    with TuningTable(path) as again:
        assert [one.flags for one in again.best(KEY)] == [digest(ONE)] * 2
        assert [one.flags for _, one in again.rows()] == [digest(ONE), digest(ONE), digest(TWO), ""]
        assert again.flags() == {digest(ONE): ONE, digest(TWO): TWO}
        assert again.notices == []
    assert stored(path) == {digest(ONE), digest(TWO)}


def test_equal_snapshots_are_stored_once_whatever_their_order(path, table):
    table.record(KEY, [measured()], ONE)
    table.record(OTHER_KEY, [measured()], dict(reversed(ONE.items())) | {"order": (*ONE["order"],)})
    assert stored(path) == {digest(ONE)}
    text = json.dumps(ONE, sort_keys=True, separators=(",", ":"))
    assert digest(ONE) == hashlib.sha256(text.encode()).hexdigest()


def test_a_snapshot_goes_with_its_last_row(path, table):
    table.record(KEY, [measured("a"), measured("b")], ONE)
    table.record(OTHER_KEY, [measured("a")], TWO)
    table.record(KEY, [measured("a")], TWO)
    assert stored(path) == {digest(ONE), digest(TWO)}
    table.record(KEY, [measured("b")], TWO)  # replaced
    assert stored(path) == {digest(TWO)}
    assert table.forget(device=KEY.device) == 2
    assert stored(path) == {digest(TWO)}
    assert table.forget() == 1  # deleted
    assert stored(path) == set()


def test_rows_keep_the_snapshot_that_they_name(path, table):
    table.record(KEY, [measured()], ONE)
    ((_, row),) = table.rows()
    table.record(OTHER_KEY, [row])  # given without a snapshot; the table has it
    table.forget(key=KEY)
    assert table.flags() == {digest(ONE): ONE}
    table.forget()
    with pytest.raises(TuningError, match=r"got '[0-9a-f]{64}'; expected .*; measure again"):
        table.record(KEY, [measured("new"), row])
    assert table.rows() == []


@pytest.mark.parametrize(
    "wrong",
    [3, "text", [1], {"a": math.nan}, {"a": object()}, {1: 0, "1": 0}, {"a": {1, 2}}, {(1, 2): 3}],
)
def test_what_is_no_plain_data_is_refused_before_the_disk_is_touched(path, table, wrong):
    with pytest.raises(TuningError, match=r"flags: got .*expected .*; .+"):
        table.record(KEY, [measured()], wrong)
    assert not path.exists()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(snapshot=st.dictionaries(st.text(), json_values, max_size=5))
def test_any_snapshot_comes_back_equal(tmp_path_factory, snapshot):
    folder = tmp_path_factory.mktemp("any")
    exported = io.StringIO()
    with (
        TuningTable(folder / "a") as a,
        TuningTable(folder / "b") as b,
        TuningTable(folder / "c") as c,
    ):
        a.record(KEY, [measured()], snapshot)
        a.export_json(exported)
        assert b.import_json(io.StringIO(exported.getvalue())) == 1
        assert c.merge(folder / "b") == 1
        for table in (a, b, c):
            assert table.flags() == {digest(snapshot): snapshot}
            assert json.dumps(table.flags()[digest(snapshot)], sort_keys=True) == json.dumps(
                snapshot, sort_keys=True
            )
            assert table.notices == []


# Carried -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["import", "merge"])
def test_snapshots_are_carried_with_the_rows_that_are_taken(tmp_path, way):
    source, target = TuningTable(tmp_path / "source"), TuningTable(tmp_path / "target")
    with source, target:
        source.record(KEY, [measured("newer")], ONE)
        source.record(KEY, [measured("older", at="2020-01-01T00:00:00Z")], TWO)
        source.record(KEY, [measured("silent")])
        target.record(KEY, [measured("newer", at="2020-01-01T00:00:00Z"), measured("older")])
        if way == "merge":
            assert target.merge(source.path) == 2
        else:
            source.export_json(tmp_path / "x.json")
            assert target.import_json(tmp_path / "x.json") == 2
        taken = {one.backend: one.flags for _, one in target.rows()}
        assert taken == {"newer": digest(ONE), "older": "", "silent": ""}
        assert target.flags() == {digest(ONE): ONE}
    assert stored(tmp_path / "target") == {digest(ONE)}


def test_the_newest_of_two_rows_of_one_document_wins(table):
    exported = io.StringIO()
    table.record(KEY, [measured(median=1e-5)])
    table.export_json(exported)
    document = json.loads(exported.getvalue())
    (row,) = document["rows"]
    document["rows"].append(row | {"median_s": 2e-5, "measured_at": "2020-01-01T00:00:00Z"})
    table.forget()
    assert table.import_json(io.StringIO(json.dumps(document))) == 1
    assert [one.median_s for one in table.best(KEY)] == [1e-5]


def test_memory_has_the_snapshots_of_a_file_out_of_reach(path, monkeypatch):
    with TuningTable(path) as table:
        table.record(KEY, [measured()], ONE)

    def refused(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("polyattn.tuning.storage.file_lock", refused)
    with TuningTable(path) as table:
        table.record(OTHER_KEY, [measured()], TWO)
        assert not table.persistent
        assert table.flags() == {digest(ONE): ONE, digest(TWO): TWO}
        assert len(table.best(KEY)) == 1


# Damaged -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM flags WHERE digest = ?",
        "UPDATE flags SET snapshot = replace(snapshot, '2', '3') WHERE digest = ?",
        "UPDATE flags SET snapshot = '{' WHERE digest = ?",
        "UPDATE flags SET snapshot = '' WHERE digest = ?",
        "UPDATE flags SET snapshot = x'00ff' WHERE digest = ?",
        "UPDATE flags SET snapshot = CAST(x'ff' AS TEXT) WHERE digest = ?",
        "UPDATE flags SET digest = 'x' WHERE digest = ?",
        "UPDATE measurements SET flags = 'x' WHERE flags = ?",
        "UPDATE measurements SET flags = '' WHERE flags = ?",
        "UPDATE measurements SET flags = x'00' WHERE flags = ?",
        "UPDATE measurements SET flags = upper(flags) WHERE flags = ?",
    ],
)
def test_rows_whose_snapshot_is_damaged_are_ignored_with_a_notice(path, damage, tmp_path):
    with TuningTable(path) as table:
        table.record(KEY, [measured("damaged", 1e-6)], ONE)
        table.record(KEY, [measured("whole")], TWO)
        kept = [measured("whole", flags=digest(TWO))]
        assert len(table.best(KEY)) == 2
        edit(path, damage, digest(ONE))
        exported = io.StringIO()
        assert table.best(KEY) == [one for _, one in table.rows()] == kept
        assert table.flags() == {digest(TWO): TWO}
        assert table.export_json(exported) == 1
        assert set(json.loads(exported.getvalue())["flags"]) == {digest(TWO)}
        assert len(table.notices) == 1
        assert "'damaged' is not valid and is ignored" in table.notices[0]
        with TuningTable(tmp_path / "other") as other:
            assert other.merge(path) == 1
            assert other.best(KEY) == kept
        table.record(KEY, [measured("damaged", 1e-6)], ONE)  # measured again
        assert [one.backend for one in table.best(KEY)] == ["damaged", "whole"]
        assert table.flags() == {digest(ONE): ONE, digest(TWO): TWO}
    assert stored(path) == {digest(ONE), digest(TWO)}


def test_a_digest_changed_to_another_known_one_is_seen(path, table):
    table.record(KEY, [measured("a")], ONE)
    table.record(KEY, [measured("b")], TWO)
    edit(path, "UPDATE measurements SET flags = ? WHERE backend = 'a'", digest(TWO))
    assert [one.backend for one in table.best(KEY)] == ["b"]
    assert "checksum" in table.notices[0]


def test_a_look_up_of_times_parses_no_snapshot(table, monkeypatch):
    table.record(KEY, [measured()], ONE)

    def parsed(text, **how):
        raise AssertionError(f"parsed {text}")

    monkeypatch.setattr(json, "loads", parsed)
    assert len(table.best(KEY)) == 1
