"""`polyattn tune` says under which flags times were measured."""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from polyattn import flags as knobs
from polyattn.cli import main
from polyattn.problem import Problem
from polyattn.torch.flags import snapshot
from polyattn.tuning import Key, Measurement, digest, lookup

P = Problem(batch=2, q_len=16, kv_len=16, heads=4, kv_heads=4, head_dim=8, layout="BNTH")


@pytest.fixture(autouse=True)
def table():
    """The process's own table, empty before and after."""
    found = lookup.table()
    found.forget()
    yield found
    found.forget()


def record(table, backends, flags=None):
    rows = [Measurement(name, "{}", 2e-5, 1e-5, 3e-5, 20, 0.0, 1e-6, True) for name in backends]
    table.record(lookup.key_for(P, "cpu:test", "polyattn=0"), rows, flags)


def show(capsys):
    assert main(["tune", "--show"]) == 0
    text = capsys.readouterr().out
    assert main(["tune", "--show", "--json"]) == 0
    return text, json.loads(capsys.readouterr().out)


def other_threads(now):
    """A snapshot with another number of threads, and the names of what differs."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        then = snapshot()
    finally:
        torch.set_num_threads(before)
    return then, knobs.diff(then, now)


def test_show_names_the_knobs_that_stood_otherwise(table, capsys):
    now = snapshot()
    then, differing = other_threads(now)
    assert differing
    record(table, ["as_now"], now)
    record(table, ["other", "another"], then)
    record(table, ["from_before"])
    text, plain = show(capsys)
    for line in text.splitlines():
        if "as_now" in line:
            assert "as now" in line
        if "from_before" in line:
            assert "not recorded" in line
        if " other " in line or "another" in line:
            assert "differ (1)" in line
    assert "differ (1): 2 rows were measured under flags that differ" in " ".join(text.split())
    for line in knobs.lines(differing):
        assert f"  {line}" in text
    assert {row["backend"]: row["flags"] for row in plain["rows"]} == {
        "as_now": digest(now),
        "other": digest(then),
        "another": digest(then),
        "from_before": "",
    }
    assert set(plain["flags"]) == {digest(now), digest(then)}
    assert knobs.diff(plain["flags"][digest(then)], then) == {}
    assert plain["differ"] == {digest(then): {name: list(pair) for name, pair in differing.items()}}
    assert plain["unknown"] == {}


def test_show_is_quiet_where_nothing_differs(table, capsys):
    record(table, ["as_now"], snapshot())
    text, plain = show(capsys)
    assert "differ" not in text and "not recorded" not in text
    assert (plain["differ"], plain["unknown"]) == ({}, {})


def test_a_knob_that_cannot_be_read_now_is_not_said_to_differ(table, capsys):
    now = snapshot()
    unreadable = now[knobs.META]["unreadable"]
    values = {name: value for name, value in now.items() if name != knobs.META}
    name = next(iter(unreadable), "cudnn.benchmark")
    record(table, ["on_a_device"], knobs.make("torch", values | {name: 7}, {}))
    hidden = "cudnn.deterministic"
    del values[hidden]
    record(table, ["elsewhere"], knobs.make("torch", values, unreadable | {hidden: "no device"}))
    _, plain = show(capsys)
    assert len(plain["flags"]) == 2
    assert (plain["differ"] == {}) == bool(unreadable)


@pytest.mark.parametrize(
    "strange",
    [
        {"threads": 1},
        {knobs.META: {"schema": 99, "framework": "torch", "unreadable": {}}},
        knobs.make("abacus", {"beads": 10}, {}),
    ],
)
def test_show_says_what_it_cannot_compare(table, capsys, strange):
    record(table, ["one"], strange)
    text, plain = show(capsys)
    assert "unknown (1): 1 row was measured under flags that cannot be compared" in " ".join(
        text.split()
    )
    assert list(plain["unknown"]) == list(plain["flags"]) == [digest(strange)]
    assert plain["flags"][digest(strange)] == strange


def test_an_empty_table_is_shown(table, capsys):
    text, plain = show(capsys)
    assert "0 rows" in text
    assert plain == {"rows": [], "flags": {}, "differ": {}, "unknown": {}}


def test_rows_of_no_problem_are_shown_as_they_stand(table, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    record(table, ["of_a_problem"])
    row = Measurement("foreign", "{}", 2e-5, 1e-5, 3e-5, 20, 0.0, 1e-6, True)
    table.record(Key("cpu:test", "polyattn=0", "some problem"), [row])
    text, plain = show(capsys)
    assert "some problem" in text and "query (2," in text
    assert {one["backend"] for one in plain["rows"]} == {"of_a_problem", "foreign"}


@pytest.mark.parametrize("target", ["-", "/dev/stdout"])
def test_export_goes_to_a_pipe(table, target):
    record(table, ["one"])
    command = [sys.executable, "-m", "polyattn", "tune", "--export", target]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    document, _ = json.JSONDecoder().raw_decode(made.stdout)
    assert [row["backend"] for row in document["rows"]] == ["one"]


def test_export_to_standard_output_is_json_already(table, capsys):
    assert main(["tune", "--export", "-", "--json"]) == 2
    assert "expected one of them" in capsys.readouterr().err
