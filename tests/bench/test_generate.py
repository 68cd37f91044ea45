"""The benchmark of text generation: its rows, its processes, its verdict. No figure is a test."""

import dataclasses
import json
import multiprocessing
import sys

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from polyattn.bench import main, records
from polyattn.bench.generate import generate_table as report
from polyattn.bench.generate import models
from polyattn.bench.generate import whole_run as run
from polyattn.bench.generate.figures import MOST_NOISE, agreement, figures
from polyattn.bench.generate.generated import QUICK, ROWS, Row, chosen
from polyattn.bench.generate.models import Sizes
from polyattn.bench.generate.sides import Generated, SideFailed, Sides
from polyattn.bench.generate.worker import SIDES, Answers, Job, Turn

TINY = Sizes(
    width=32,
    inner=48,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=8,
    window=8,
    frames=16,
    vocabulary=64,
)
SMALL = (
    Row("llama", "dynamic", 24, "float32", as_run=True),
    Row("llama", "static", 24, "float32", batch=3),
    Row("gemma", "dynamic", 24, "bfloat16"),
    Row("gemma", "static", 24, "float32"),
    Row("gemma-2", "dynamic", 24, "float32"),
    Row("whisper", "dynamic", 0, "float32"),
)
OPTIONS = run.Options(SMALL, tokens=20, block=5, threads=1, sizes=TINY)


@pytest.fixture(scope="module")
def record() -> dict:
    return run.measure(OPTIONS)


def test_the_rows_are_those_that_the_goal_speaks_of() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    for dtype in ("fp32", "bf16"):
        for context in ("128", "1k", "4k"):
            for kind in (
                "llama dynamic",
                "llama static",
                "llama dynamic padded x2",
                "gemma dynamic",
                "gemma static",
            ):
                assert f"{kind} {context} {dtype}" in names
        assert {f"whisper dynamic {dtype}", f"llama static compiled 4k {dtype}"} <= {*names}
    assert {row.goal for row in ROWS if row.context == 4096} == {1.3}
    assert {row.goal for row in ROWS if row.context < 4096} == {1.0}
    assert {row.name for row in QUICK} <= {*names}


def test_a_pattern_chooses_rows() -> None:
    assert [row.name for row in chosen("llama dynamic 4k", False)] == [
        "llama dynamic 4k fp32",
        "llama dynamic 4k bf16",
    ]
    assert all(row.compiled for row in chosen("*compiled*fp32", False))
    assert chosen("", True) == QUICK


@pytest.mark.parametrize("name", ["llama", "gemma", "gemma-2", "whisper"])
def test_the_same_seed_gives_the_same_model_and_prompt(name: str) -> None:
    row = Row(name, "dynamic", 16, "float32", batch=2)
    one, other = (models.build(row, 3, TINY) for _ in range(2))
    state = other.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in one.state_dict().items())
    assert not one.training
    first, second = (models.prompt(row, 5, TINY) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_texts_of_a_batch_are_padded_on_the_left() -> None:
    row = Row("llama", "dynamic", 16, "float32", batch=3)
    given = models.prompt(row, 0, TINY)
    assert given["attention_mask"].sum(1).tolist() == [16, 12, 8]
    assert given["attention_mask"][:, -1].tolist() == [1, 1, 1]
    assert (given["input_ids"][given["attention_mask"] == 0] == 0).all()


@pytest.mark.slow
def test_every_row_is_generated_alike_on_all_sides(record: dict) -> None:
    assert [row["name"] for row in record["rows"]] == [row.name for row in SMALL]
    for row in record["rows"]:
        assert not row["agreement"]["wrong"], row
        for clock in ("wall", "processor"):
            ratio = row["ratio"][clock]
            assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
            assert row["token_ms"]["stock"][clock] > 0
            assert row["noise"][clock] >= 0
            assert row["prefill"][clock]["ratio"] > 0
        assert row["threads"] == 1
        assert row["met"] in (True, False, None)
    assert record["lengths"] == "fresh"
    assert record["goals_met"] in (True, False, None)


@pytest.mark.slow
def test_the_calls_of_polyattn_are_counted(record: dict) -> None:
    of_row = {row["name"]: row for row in record["rows"]}
    for row in SMALL:
        calls = sum(of_row[row.name]["ran"].values())
        layers = {"gemma-2": 0, "whisper": 2 * TINY.layers}.get(row.model, TINY.layers)
        assert calls == layers * OPTIONS.block, row.name
        assert "torch" not in of_row[row.name]["ran"]
        assert (of_row[row.name]["as_run"] is not None) == row.as_run
    share = {name: row["attention_share"] for name, row in of_row.items()}
    assert share.pop("gemma-2 dynamic 24 fp32") is None
    assert all(0 < value < 1 for value in share.values())


@pytest.mark.slow
def test_the_record_can_be_written_read_and_compared(record: dict, tmp_path, capsys) -> None:
    path = tmp_path / "generate.json"
    records.write(record, path)
    assert records.read(path)["kind"] == "generate"
    assert main(["compare", str(path), str(path)]) == 0
    capsys.readouterr()
    report.print_record(record)
    said = capsys.readouterr().out
    assert all(row.name.split()[0] in said for row in SMALL)
    assert "polyattn has no part in it" in said  # Gemma 2


@pytest.mark.slow
def test_a_side_that_fails_ends_no_other_row() -> None:
    rows = (Row("llama", "dynamic", 24, "float33"), SMALL[3])
    record = run.measure(dataclasses.replace(OPTIONS, rows=rows, known=True))
    failed, right = record["rows"]
    assert record["lengths"] == "known"  # not to be mistaken for a run of fresh ones
    assert "float33" in failed["failed"]["why"] and failed["met"] is None
    assert not right["agreement"]["wrong"]
    assert record["goals_met"] is not True
    assert multiprocessing.active_children() == []
    report.print_record(record)


@pytest.mark.slow
def test_an_interrupted_run_keeps_its_rows_and_leaves_no_process() -> None:
    heard: list[str] = []

    def say(line: str) -> None:
        heard.append(line)
        if len(heard) == 2:
            raise KeyboardInterrupt

    record = run.measure(dataclasses.replace(OPTIONS, rows=SMALL[2:4]), say)
    assert record["interrupted"] and [row["name"] for row in record["rows"]] == [SMALL[2].name]
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_compiled_steps_of_both_caches_agree() -> None:
    rows = [Row("llama", cache, 24, "float32", compiled=True) for cache in ("static", "dynamic")]
    sizes = dataclasses.replace(TINY, layers=2)  # each is compiled by itself
    record = run.measure(dataclasses.replace(OPTIONS, rows=tuple(rows), sizes=sizes))
    for row in record["rows"]:
        assert not row.get("failed"), row
        assert not row["agreement"]["wrong"] and row["ran"] is None


def test_a_process_that_ends_is_a_failure_of_its_side() -> None:
    with Sides(("stock",)) as sides:
        (process,) = multiprocessing.active_children()
        process.kill()
        process.join()
        with pytest.raises(SideFailed, match="stock: its process has ended"):
            sides.generate(Job(SMALL[0], 11, 5), ("stock",))
    assert multiprocessing.active_children() == []


def _generated(seconds: dict[str, list[float]]) -> Generated:
    turns = {
        side: [Turn(1.0, 1.0, 0), *(Turn(x, x, 1) for x in (9.0, *times))]
        for side, times in seconds.items()
    }
    logits = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    same = Answers(logits, [[3, 3]] * 3, {"native_cpu": 4}, 0.5, 2)
    return Generated(turns, dict.fromkeys(seconds, same), 0.01)


@pytest.mark.parametrize(
    ("ours", "again", "met"),
    [(1.0, 1.0, True), (1.2, 1.0, False), (0.5, 1.0, True), (1.02, 1.04, True), (1.0, 2.0, None)],
)
def test_the_goal_is_met_within_what_stock_differs_from_itself(
    ours: float, again: float, met: bool | None
) -> None:
    found = _generated({"stock": [1.0] * 8, "polyattn": [ours] * 8, "again": [again] * 8})
    row = figures(SMALL[0], found)
    assert row["met"] is met
    assert (max(row["noise"].values()) > MOST_NOISE) is (met is None)


def test_a_long_context_has_to_gain() -> None:
    long = Row("llama", "dynamic", 4096, "float32")
    found = {
        side: _generated({"stock": [1.3] * 8, "polyattn": [side] * 8, "again": [1.3] * 8})
        for side in (1.0, 1.2)
    }
    assert figures(long, found[1.0])["met"] is True
    assert figures(long, found[1.2])["met"] is False


def _answers(logits: np.ndarray) -> Answers:
    return Answers(logits, logits.argmax(-1).tolist(), None, None, 1)


def test_other_tokens_and_other_logits_are_wrong() -> None:
    source = np.random.default_rng(0)
    logits = source.normal(size=(6, 2, 50)).astype(np.float32)
    row, bf16 = SMALL[0], SMALL[2]
    assert agreement(row, _answers(logits), _answers(logits.copy()))["wrong"] == ""
    far = logits.copy()
    far[4, 1, 7] = 100.0
    told = agreement(row, _answers(logits), _answers(far))
    assert told["parted_at"] == 4 and told["wrong"]
    rounded = logits + source.normal(size=logits.shape).astype(np.float32) * 0.005
    assert "differ" in agreement(row, _answers(logits), _answers(rounded))["wrong"]
    assert agreement(bf16, _answers(logits), _answers(rounded))["wrong"] == ""
    unknown = logits.copy()
    unknown[2, 0, 0] = np.nan
    assert agreement(bf16, _answers(logits), _answers(unknown))["wrong"]


def test_a_tie_may_part_the_texts() -> None:
    logits = np.zeros((3, 1, 50), np.float32)
    logits[:, :, :20] = np.linspace(-3, 1, 20)
    logits[:, :, 5] = logits[:, :, 6] = 2.0
    near = logits.copy()
    near[1, 0, 6] += 1e-6
    told = agreement(SMALL[0], _answers(logits), _answers(near))
    assert told["parted_at"] == 1 and told["wrong"] == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "gpt"], "llama dynamic 128 fp32"),
        (["--quick", "--record"], "name a FILE"),
        (["--tokens", "5"], "at least 20"),
        (["--threads", "-1"], "at least 1"),
    ],
)
def test_what_cannot_be_asked_for_is_said(arguments: list[str], said: str, capsys) -> None:
    assert main(["generate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_without_transformers_it_says_how_to_get_it(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["generate", "--quick"]) == 2
    assert "pip install 'polyattn[bench]'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_a_record(monkeypatch, capsys) -> None:
    measure = run.measure
    monkeypatch.setattr(
        run, "measure", lambda options, say: measure(dataclasses.replace(options, sizes=TINY), say)
    )
    code = main(["generate", "--only", "llama static 128 fp32", "--tokens", "20", "--json"])
    written = capsys.readouterr()
    record = json.loads(written.out)
    assert code == {True: 0, False: 1, None: 2}[record["goals_met"]]
    assert "1/1 llama static 128 fp32" in written.err
    assert len(SIDES) == 4 and set(record["rows"][0]["token_ms"]) == set(SIDES[:3])
