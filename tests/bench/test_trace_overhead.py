"""The cost of recording: what is timed, how it is counted, what is written. No figure is a test."""

import contextlib
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from polyattn.bench.trace import overhead
from polyattn.bench.trace.allocator import KEEPS, SYSTEM
from polyattn.bench.trace.overhead_models import MODELS, make
from polyattn.bench.trace.overhead_peers import CASES, Case
from polyattn.bench.trace.overhead_timing import interval, summary, time_cases

TINY = next(one for one in MODELS if one.goal is None)


@pytest.fixture(scope="module")
def record():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overhead, "MODELS", (TINY,))
        patch.setattr(overhead, "QUICK_ROUNDS", 2)
        patch.setattr(overhead, "QUICK_BLOCK_S", 0.001)
        patch.setattr(overhead, "keep_memory", lambda: KEEPS)  # this process runs other tests
        part = overhead.measure(SimpleNamespace(quick=True, seed=0), lambda line: None)
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


def test_the_record_says_what_the_allocator_does(record, capsys) -> None:
    part = record["overhead"]
    (model,) = part["models"]
    assert part["allocator"] == KEEPS and part["block_s"] == 0.001
    assert 0 <= model["page_faults"]["median"] <= model["page_faults"]["max"]
    overhead.table(record)
    printed = capsys.readouterr().out.replace("\n", " ")
    assert f"memory allocator: {KEEPS}" in printed and "page faults in an untraced" in printed


FREED_AND_TAKEN = """
import ctypes
from polyattn.bench.trace import allocator
said = allocator.keep_memory() if {keep} else allocator.SYSTEM
def taken():
    return [bytearray(8 << 20) for _ in range(4)]
taken(), taken()
before = allocator.page_faults()
taken()
print(said, allocator.page_faults() - before, sep=",")
"""


def test_memory_that_is_kept_is_not_faulted_in_again() -> None:
    found = [
        subprocess.run(
            [sys.executable, "-c", FREED_AND_TAKEN.format(keep=keep)],
            capture_output=True,
            text=True,
            check=True,
        )
        .stdout.strip()
        .split(",")
        for keep in (False, True)
    ]
    if found[1][0] == SYSTEM:
        pytest.skip("no glibc")
    assert found[1][0] == KEEPS
    assert int(found[0][1]) > 1000 > 10 * int(found[1][1])


@contextlib.contextmanager
def slow(model, folder):
    handle = model.register_forward_hook(lambda *_: time.sleep(0.15))
    try:
        yield lambda: None
    finally:
        handle.remove()


def test_a_case_has_the_forwards_that_fill_a_block_of_its_own(tmp_path) -> None:
    cases = [Case("slow", slow), Case("plain", lambda *_: contextlib.nullcontext(lambda: None))]
    model, called = torch.nn.Linear(4, 4), []
    model.register_forward_pre_hook(lambda *_: called.append(time.perf_counter()))
    inputs = [{"input": torch.ones(1, 4)}]
    found = time_cases(model, inputs, cases, tmp_path, rounds=1, block_s=0.2)
    assert found.forwards["slow"] == 2 and found.forwards["plain"] > 10
    assert found.ratios["slow"].wall[0] > 5


def test_a_forward_that_fills_a_block_needs_none_before_it(tmp_path) -> None:
    called = []
    model = torch.nn.Linear(4, 4)
    model.register_forward_pre_hook(lambda *_: called.append(time.sleep(0.02)))
    plain = Case("plain", lambda *_: contextlib.nullcontext(lambda: None))
    found = time_cases(
        model, [{"input": torch.ones(1, 4)}], [plain], tmp_path, rounds=1, block_s=0.01
    )
    # of model and case one and one before it, to see how long it is; 3 blocks of 2 in each round
    assert len(called) == 4 + 6 * (1 + found.dropped)


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
