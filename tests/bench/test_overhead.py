"""The overhead benchmark: what it times, how it counts, what it writes. No figure is a test."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from polyattn.bench import main, records
from polyattn.bench import overhead_cases as cases
from polyattn.bench import overhead_in_programs as in_programs
from polyattn.bench.overhead import measure
from polyattn.bench.timing import Pair, Timed, calibrate, time_pairs
from polyattn.errors import PolyattnError
from polyattn.selection.evidence import KINDS, Evidence, Figure
from polyattn.selection.evidence.of_machine import assume


@pytest.fixture(scope="module")
def record() -> dict:
    return measure(rounds=2, block_s=2e-4, peers=True)


def test_what_is_known_of_this_machine_takes_no_part() -> None:
    figure = Figure(1.3, 1.4, 1.5, "as if native_cpu were the faster for all that is small")
    with assume(Evidence({("float32", kind): figure for kind in KINDS})):
        rows = measure(rounds=1, block_s=1e-4, peers=False)["rows"]
    assert rows


def test_a_pair_measures_the_difference_of_its_statements() -> None:
    slow = Pair("spin(400)", "spin(100)")
    names = {"spin": lambda n: sum(range(n))}
    (timed,), quiet = time_pairs([slow], names, rounds=3, block_s=1e-3)
    summary = timed.summary()
    assert len(timed.extras) == len(timed.bases) == 15
    assert summary["extra_us"]["min"] <= summary["extra_us"]["median"] <= summary["extra_us"]["max"]
    assert summary["extra_us"]["median"] > summary["over_us"]  # 300 steps more, over 100
    assert len(quiet.foreign) == 3 and 0 <= quiet.dropped <= 3


def test_a_scope_surrounds_the_statement_only() -> None:
    from contextlib import contextmanager

    inside: list[bool] = [False]
    seen: dict[str, set[bool]] = {"a": set(), "b": set()}

    @contextmanager
    def scope():
        inside[0] = True
        yield
        inside[0] = False

    names = {"note": lambda which: seen[which].add(inside[0])}
    time_pairs([Pair("note('a')", "note('b')", scope)], names, rounds=2, block_s=1e-4)
    assert seen == {"a": {True}, "b": {False}}


def test_blocks_are_as_long_as_asked() -> None:
    calls = calibrate(Pair("spin()", "spin()"), {"spin": lambda: sum(range(100))}, 1e-3)
    assert calls > 10
    assert calibrate(Pair("spin()", "spin()"), {"spin": lambda: sum(range(10**5))}, 1e-6) == 1


def test_quartiles_come_from_the_differences() -> None:
    extra = Timed(1, [0.0, 1e-6, 2e-6, 3e-6, 4e-6], [1e-6] * 5).summary()["extra_us"]
    assert extra == {"median": 2.0, "min": 0.0, "max": 4.0, "q1": 1.0, "q3": 3.0}


def test_the_record_has_every_row_with_its_goal(record: dict) -> None:
    rows = {row["name"]: row for row in record["rows"]}
    assert {case.name for case in cases.our_cases()} <= set(rows)
    for name, goal in (
        ("attention, BTNH", 1.0),
        ("plan step, BNTH", 0.2),
        ("attention, compiled", 1.0),
    ):
        assert rows[name]["goal_us"] == goal and rows[name]["met"] in (True, False)
    assert record["goals_met"] == all(row.get("met", True) for row in record["rows"])
    assert record["machine"]["cores"] >= 1 and record["versions"]["torch"]
    assert record["schema"] == records.SCHEMA and json.loads(records.dump(record)) == record


def test_calls_as_programs_make_them_are_timed_beside_torch(record: dict) -> None:
    rows = record["in_programs"]
    assert [row["name"] for row in rows] == [call.name for call in in_programs.calls()]
    assert len({row["name"] for row in rows}) == len(rows) == 10
    for row in rows:
        ratio = row["ratio"]
        assert row["torch_us"] > 0 and row["ours_us"] > 0 and row["ran"]
        assert 0 < ratio["q1"] <= ratio["median"] <= ratio["q3"]


def test_each_turn_works_before_each_call_and_begins_with_another() -> None:
    done = []
    taken = in_programs._by_turns(
        {"a": "a", "b": "b"}, done.append, lambda: done.append("work"), count=3
    )
    assert done == ["work", "a", "work", "b", "work", "b", "work", "a", "work", "a", "work", "b"]
    assert [len(times) for times in taken.values()] == [3, 3]


def test_peers_that_are_absent_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = [c for c in cases.peer_cases({}) if isinstance(c, cases.Missing)]
    assert [peer.name.split()[0] for peer in missing] == ["diffusers", "transformers"]
    assert all("pip install" in peer.how_to_get_it for peer in missing)


def test_a_row_that_computes_something_else_is_refused() -> None:
    from polyattn.bench.overhead import _require_same_answer

    names = cases.namespace()
    with pytest.raises(PolyattnError, match="different results"):
        _require_same_answer(cases.Case("wrong", "attention(q, k, v)", cases.BNTH), names)


def test_another_backend_than_the_one_compared_with_is_refused(
    capsys: pytest.CaptureFixture,
) -> None:
    from polyattn import use_backend

    with use_backend("sdpa_math"):
        assert main(["overhead", "--rounds", "2"]) == 2
    assert "sdpa_math" in capsys.readouterr().err


def test_the_process_is_left_as_it_was(record: dict) -> None:
    import gc

    import torch

    threads, armed = torch.get_num_threads(), gc.isenabled()
    measure(rounds=2, block_s=1e-4, peers=False)
    assert (torch.get_num_threads(), gc.isenabled()) == (threads, armed)


def test_command_prints_table_and_writes_record(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["overhead", "--rounds", "2", "--block-ms", "0.1", "--no-peers"]
    code = main([*quick, "--out"])
    printed = capsys.readouterr().out
    (written,) = (tmp_path / "benchmarks" / "results").rglob("overhead.json")
    assert code == (0 if records.read(written)["goals_met"] else 1)
    assert "goal us" in printed and "median" in printed
    code = main([*quick, "--json"])
    assert json.loads(capsys.readouterr().out)["kind"] == "overhead"


@pytest.mark.parametrize("rounds", ["1", "0", "-3"])
def test_too_few_rounds_are_refused(rounds: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["overhead", "--rounds", rounds]) == 2
    assert "at least 2" in capsys.readouterr().err


@pytest.mark.parametrize("block_ms", ["nan", "inf", "0"])
def test_blocks_without_a_length_are_refused(block_ms: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["overhead", "--block-ms", block_ms]) == 2
    assert "longer than 0 ms" in capsys.readouterr().err


def test_plot_is_drawn(record: dict, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from polyattn.bench.plot import draw

    assert draw(record, tmp_path / "a" / "plot.png").stat().st_size > 1000


def shifted(record: dict, by: float) -> dict:
    copy = json.loads(records.dump(record))
    for row in copy["rows"]:
        if row.get("extra_us"):
            row["extra_us"] = {name: value + by for name, value in row["extra_us"].items()}
    return copy


def test_compare_knows_slower_from_noise(
    record: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name, by in (("a", 0.0), ("b", 1e4)):
        records.write(shifted(record, by), tmp_path / f"{name}.json")
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    assert main(["compare", a, a]) == 0
    assert main(["compare", a, b]) == 1
    assert main(["compare", b, a]) == 0
    capsys.readouterr()
    assert main(["compare", a, b, "--json"]) == 1
    compared = json.loads(capsys.readouterr().out)
    assert {row["verdict"] for row in compared["rows"]} == {"slower"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "other", "rows": []}', "nonsense"])
def test_a_foreign_file_is_a_clear_error(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    assert main(["compare", str(path), str(path)]) == 2
    assert "polyattn bench" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "none.json"), str(path)]) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"machine": None}, "'machine'"),
        ({"versions": 3}, "'versions'"),
        ({"rows": {}}, "'rows'"),
        ({"rows": ["name"]}, "'rows'"),
        ({"rows": [{}]}, "no name"),
        ({"rows": [{"name": "a", "extra_us": 3}]}, "'extra_us' of the row 'a'"),
        ({"rows": [{"name": "a", "extra_us": {"median": 1.0}}]}, "quartiles"),
    ],
)
def test_a_damaged_record_is_a_clear_error(
    changes: dict, said: str, record: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "damaged.json"
    records.write({**record, **changes}, path)
    assert main(["compare", str(path), str(path)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_records_without_a_row_in_common_cannot_be_compared(
    record: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    whole, other = tmp_path / "whole.json", tmp_path / "other.json"
    records.write(record, whole)
    for rows in ([], [{"name": "no such", "extra_us": {"median": 1, "q1": 1, "q3": 1}}]):
        records.write({**record, "rows": rows}, other)
        assert main(["compare", str(whole), str(other)]) == 2
        assert "no row in common" in " ".join(capsys.readouterr().err.split())
