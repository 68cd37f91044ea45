"""The cost of recording: what is timed, how it is counted, what is written. No figure is a test."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from polyattn.bench.trace import overhead
from polyattn.bench.trace.overhead_models import MODELS, make
from polyattn.bench.trace.overhead_peers import CASES
from polyattn.bench.trace.overhead_timing import interval, summary, time_cases

TINY = next(one for one in MODELS if one.goal is None)


@pytest.fixture(scope="module")
def record():
    old = overhead.MODELS, overhead.QUICK_ROUNDS, overhead.QUICK_BLOCK_S
    overhead.MODELS, overhead.QUICK_ROUNDS, overhead.QUICK_BLOCK_S = (TINY,), 2, 0.001
    try:
        part = overhead.measure(SimpleNamespace(quick=True, seed=0), lambda line: None)
    finally:
        overhead.MODELS, overhead.QUICK_ROUNDS, overhead.QUICK_BLOCK_S = old
    return {"rows": part.pop("rows"), "overhead": part}


def test_every_case_has_a_row_with_its_interval(record) -> None:
    rows = record["rows"]
    assert [row["case"] for row in rows] == [case.name for case in CASES]
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        time = row["relative"]
        assert 0 < time["low"] <= time["median"] <= time["high"]
        assert (row["until_written"] is not None) == (row["case"] == "polyattn trace")
    hashes = rows[-1]["relative"]["median"]
    assert hashes > 1.2  # hashing every tensor of a tiny model is never free
    json.dumps(record)


def test_what_a_forward_writes_is_counted(record) -> None:
    (model,) = record["overhead"]["models"]
    assert model["modules"] == 33
    assert model["records_per_forward"] > 2 * 28
    size = model["bytes_per_forward"] / model["records_per_forward"]
    assert model["bytes_per_record"] == round(size, 1)
    assert model["met"] is (size <= overhead.GOAL_BYTES) is True
    assert record["overhead"]["goals_met"] is True  # the tiny model's time has no goal


def test_the_table_says_it_all(record, capsys) -> None:
    overhead.table(record | {"rows": [*record["rows"], {"name": "of another part"}]})
    printed = capsys.readouterr().out
    for case in CASES:
        assert case.name.split(",")[0] in printed
    assert "bytes a record" in printed.replace("\n", " ") and "of another part" not in printed


def test_nothing_stays_on_the_model(tmp_path) -> None:
    model, inputs = make(TINY, 0)
    before = model(**inputs[0]).logits
    time_cases(model, inputs, CASES, tmp_path, rounds=1, block_s=0.001)
    assert not any(
        hooks
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
    )
    assert torch.equal(model(**inputs[0]).logits, before)


def test_weights_and_inputs_are_those_of_the_seed() -> None:
    one, two, other = make(TINY, 1), make(TINY, 1), make(TINY, 2)
    assert torch.equal(one[0].lm_head.weight, two[0].lm_head.weight)
    assert torch.equal(one[1][3]["input_ids"], two[1][3]["input_ids"])
    assert not torch.equal(one[0].lm_head.weight, other[0].lm_head.weight)
    assert not torch.equal(one[1][0]["input_ids"], one[1][1]["input_ids"])


def test_the_interval_holds_the_median_19_times_in_20() -> None:
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(2000):
        low, high = interval(torch.rand(25, generator=generator).tolist())
        held += low <= 0.5 <= high
    assert 0.94 < held / 2000 < 0.985
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert summary([1.0, 2.0])["median"] == 1.5
