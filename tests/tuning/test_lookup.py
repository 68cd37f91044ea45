"""The snapshot of the tuning table that choices read: when it is read again, and when not."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polyattn import Problem
from polyattn.tuning import Key, Measurement, TuningTable, lookup

P = Problem(batch=3, q_len=100, kv_len=100, heads=8, kv_heads=8, head_dim=64)
DEVICE, VERSIONS = "cpu:of these tests", "polyattn=0 torch=0"


def row(backend: str = "sdpa_flash", seconds: float = 1e-3, verified: bool = True) -> Measurement:
    return Measurement(backend, "{}", seconds, seconds, seconds, 9, 0.0, 1.0, verified)


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TuningTable]:
    monkeypatch.setenv("POLYATTN_CACHE_DIR", str(tmp_path))
    yield lookup.table()
    lookup.table().close()
    lookup._tables.pop(str(tmp_path))


def found(problem: Problem = P) -> list[str]:
    return [one.backend for one in lookup.measured(problem, DEVICE, VERSIONS)]


def test_what_this_process_writes_is_seen_at_once(table: TuningTable) -> None:
    key = lookup.key_for(P, DEVICE, VERSIONS)
    assert found() == []
    table.record(key, [row("slow", 2.0), row("fast", 1.0), row("wrong", 0.1, verified=False)])
    assert found() == found(P.with_(batch=4, q_len=128)) == ["fast", "slow"]
    assert found(P.with_(q_len=129)) == []
    table.forget(backend="fast")
    assert found() == ["slow"]


def test_the_file_is_not_read_again_while_nothing_changes(
    table: TuningTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.record(lookup.key_for(P, DEVICE, VERSIONS), [row()])
    held = lookup.stored(DEVICE, VERSIONS)
    monkeypatch.setattr(lookup, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(TuningTable, "rows", None)  # nobody may ask
    assert lookup.stored(DEVICE, VERSIONS) is held and found() == ["sdpa_flash"]
    assert found(P.with_(kv_len=128)) == ["sdpa_flash"]


def test_what_another_process_writes_is_seen(
    table: TuningTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found() == []
    code = (
        "import sys; from polyattn.tuning import *; "
        "TuningTable(sys.argv[1]).record(Key(*sys.argv[2:]), "
        "[Measurement('flex', '{}', 1., 1., 1., 9, 0., 1., True)])"
    )
    key = lookup.key_for(P, DEVICE, VERSIONS)
    arguments = (str(tmp_path / "tuning.sqlite3"), key.device, key.versions, key.problem)
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=120)
    monkeypatch.setattr(lookup, "_LOOK_EVERY_S", 0.0)
    assert found() == ["flex"]


def test_another_cache_directory_is_another_table(
    table: TuningTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.record(lookup.key_for(P, DEVICE, VERSIONS), [row()])
    assert found() == ["sdpa_flash"]
    monkeypatch.setenv("POLYATTN_CACHE_DIR", str(tmp_path / "other"))
    assert found() == [] and not (tmp_path / "other").exists()
    monkeypatch.setenv("POLYATTN_CACHE_DIR", str(tmp_path))
    assert found() == ["sdpa_flash"]


def test_a_file_that_is_damaged_later_gives_no_times(
    table: TuningTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.record(lookup.key_for(P, DEVICE, VERSIONS), [row()])
    assert found() == ["sdpa_flash"]
    table.close()
    lookup._tables.pop(str(tmp_path))
    (tmp_path / "tuning.sqlite3").write_bytes(b"nothing of the kind" * 200)
    monkeypatch.setattr(lookup, "_LOOK_EVERY_S", 0.0)
    assert found() == []
    assert any("damaged" in line for line in lookup.table().notices)


def test_only_the_rows_of_one_device_are_read(table: TuningTable) -> None:
    key = lookup.key_for(P, DEVICE, VERSIONS)
    other = Key("cpu:another", VERSIONS, key.problem)
    assert table.record_all([(key, row()), (other, row("flex"))]) == 2
    assert [k.device for k, _ in table.rows(DEVICE)] == [DEVICE]
    assert [k.device for k, _ in table.rows(versions=VERSIONS)] == [other.device, DEVICE]
    assert table.rows(DEVICE, "others") == []
    assert found() == ["sdpa_flash"]


def test_a_choice_opens_no_database(table: TuningTable, monkeypatch: pytest.MonkeyPatch) -> None:
    table.record(lookup.key_for(P, DEVICE, VERSIONS), [row()])
    found()
    monkeypatch.setattr(sqlite3, "connect", None)
    monkeypatch.setattr(table._storage, "_connection", None)
    assert [found(P.with_(kv_len=n)) for n in range(65, 129)] == [["sdpa_flash"]] * 64


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_table_that_no_descriptor_was_left_for_is_opened_later(
    table: TuningTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = lookup.key_for(P, DEVICE, VERSIONS)
    with TuningTable(table.path) as other:
        other.record(key, [row("sdpa_flash", 2.0)])
    monkeypatch.setattr(lookup, "_LOOK_EVERY_S", 0.0)
    with no_descriptor_left():
        assert found() == []
        assert not table.persistent
    assert found() == ["sdpa_flash"]
    assert table.persistent
    assert "ulimit -n" in table.notices[0] and len(table.notices) == 1


def test_what_is_measured_while_no_descriptor_is_left_is_stored_later(
    table: TuningTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "_LOOK_EVERY_S", 0.0)
    key = lookup.key_for(P, DEVICE, VERSIONS)
    with TuningTable(table.path) as other:
        other.record(key, [row("slow", 2.0)])
    with no_descriptor_left():
        table.record(key, [row("fast", 1.0)])
        assert found() == ["fast"]
    assert found() == ["fast", "slow"]
    with TuningTable(table.path) as other:
        assert [one.backend for one in other.best(key)] == ["fast", "slow"]
