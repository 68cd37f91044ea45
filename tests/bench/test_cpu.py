"""The CPU benchmark: its cases, its checks, its records. No figure is a test.

Where the native kernels are not built, torch's flash kernel stands in for them: what is tested here
is the measuring.
"""

import dataclasses
import itertools
import json
import re
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from polyattn.bench import main, records
from polyattn.bench.cpu import bench_cpu as run
from polyattn.bench.cpu import cpu_table as report
from polyattn.bench.cpu import memory, room
from polyattn.bench.cpu.case_arrays import Inputs
from polyattn.bench.cpu.cases import CASES, WINDOW, Case, Size, quick
from polyattn.bench.cpu.repeats import Step, time_steps
from polyattn.bench.cpu.truth import Truth
from polyattn.bench.cpu.ways import Way, flex, folded, ours, step, torch_ways
from polyattn.bench.cpu.yardsticks import Yardsticks
from polyattn.errors import PolyattnError
from polyattn.native import module
from polyattn.selection.registry import Available
from polyattn.torch.kit.masking import Dims, materialise

BUILT = isinstance(module.status(), Available)
BACKEND = run.BACKEND if BUILT else "sdpa_flash"
TINY = run.Options(repeats=2, block_s=1e-4, quick=True, backend=BACKEND)
SMALL = [
    Case(mask, Size(2, 4, 2, 512, 512, 16), dtype, mask, train=train, layout=layout)
    for mask in ("none", "causal", "window", "blocks", "padding")
    for dtype, train, layout in (("float32", True, "BNTH"), ("bfloat16", False, "BTNH"))
]


@pytest.fixture(scope="module")
def record() -> dict:
    return run.measure(dataclasses.replace(TINY, only="short"))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_density_is_that_of_both_masks(case: Case) -> None:
    inputs = Inputs.of(case)
    full = torch.ones(2, 4, 512, 512, dtype=torch.bool)
    allowed = full if inputs.allowed is None else full & inputs.allowed
    dims = Dims.of(inputs.heads_second(inputs.q), inputs.heads_second(inputs.k))
    value = (
        full if inputs.mask is None else full & materialise(inputs.mask, dims, torch.device("cpu"))
    )
    assert torch.equal(allowed, value)
    assert int(allowed[:, 0].sum()) == case.pairs
    assert case.density == pytest.approx(float(allowed.float().mean()))
    assert allowed.any(-1).all()  # no row of the bench is empty


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_full_sizes_have_the_density_they_say(case: Case) -> None:
    wanted = {"none": 1.0, "causal": 0.5, "window": WINDOW / 4096, "blocks": 0.1, "padding": 0.5}[
        case.mask
    ]
    assert case.density == pytest.approx(wanted, rel=0.04)
    s = case.size
    dense = 4.0 * s.batch * s.heads * s.q_len * s.kv_len * s.head_dim * (3.5 if case.train else 1)
    assert case.useful_flops == pytest.approx(dense * case.density)


def test_decoding_is_timed_on_every_cache() -> None:
    found = {(c.size.batch, c.size.kv_len, c.layout, c.dtype) for c in CASES if c.group == "decode"}
    every = itertools.product((1, 8), (4096, 32768), ("BNTH", "BTNH"), ("float32", "bfloat16"))
    assert found == set(every)
    assert all((c.size.heads, c.size.kv_heads) == (32, 8) for c in CASES if c.is_decode)
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_every_route_of_torch_passes_the_check(case: Case) -> None:
    inputs = Inputs.of(case)
    truth = Truth(inputs)
    ways = [*torch_ways(inputs), ours(inputs, BACKEND)]
    assert len(ways) == (4 if case.mask in ("window", "blocks", "padding") else 3)
    for way in ways:
        errors, wrong = truth.check(way)
        if way.name != "math" or case.dtype == "float32":  # it rounds bf16 scores to bf16
            assert not wrong, (way.name, wrong)
        assert max(errors.values()) < (2e-6 if case.dtype == "float32" else 2e-2)
        assert set(errors) == {"out", *(("query", "key", "value") if case.train else ())}


@pytest.mark.parametrize("case", [c for c in SMALL if c.mask != "none"], ids=lambda c: c.name)
def test_a_route_that_forgets_the_mask_is_wrong(case: Case) -> None:
    inputs = Inputs.of(case)
    forgetful = next(iter(torch_ways(Inputs.of(dataclasses.replace(case, mask="none")))))
    assert "error" in Truth(inputs).check(forgetful)[1]


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_a_wrong_gradient_is_found(which: str) -> None:
    inputs = Inputs.of(SMALL[2])
    right = ours(inputs, BACKEND)

    def call(q, k, v):
        found = {"query": q, "key": k, "value": v}
        found[which] = found[which] * 1.001 - found[which].detach() * 0.001
        return right.call(*found.values())

    errors, wrong = Truth(inputs).check(Way("off by a thousandth", call))
    assert wrong.startswith(which) and errors[which] > 5e-4 and errors["out"] < 1e-6


def test_folded_is_the_same_attention() -> None:
    case = Case("decode", Size(2, 8, 2, 1, 300, 32), layout="BTNH")
    inputs = Inputs.of(case)
    way = folded(inputs)
    assert isinstance(way, Way) and not Truth(inputs).check(way)[1]
    assert folded(Inputs.of(SMALL[0])) is None


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "window", "blocks", "padding"])
def test_flex_computes_the_case(mask: str) -> None:
    inputs = Inputs.of(next(c for c in SMALL if c.mask == mask and not c.train))
    way = flex(inputs)
    assert isinstance(way, Way), way
    assert not Truth(inputs).check(way)[1] and dict(way.prepare_s)["compile"] > 0


def test_flex_says_what_it_cannot() -> None:
    assert "backward" in flex(Inputs.of(SMALL[0])).why


def test_steps_are_interleaved_and_repeated() -> None:
    calls: list[str] = []
    steps = {name: Step(lambda name=name: calls.append(name)) for name in "ab"}
    series, quiet = time_steps(steps, repeats=3, block_s=1e-5)
    assert len(quiet.foreign) == 3 and 0 <= quiet.dropped <= 3
    for one in series.values():
        assert len(one.seconds) == len(one.processor) == 3
        assert min(one.seconds) > 0 and min(one.processor) >= 0
    turns = len(re.findall("ab|ba", "".join(key for key, _ in _runs(calls))))
    assert turns >= 3  # not all of one before the other


def test_what_is_large_is_warmed_before_each_block_and_that_call_is_not_timed() -> None:
    asked: list[int] = []

    def elsewhere(calls: int) -> tuple[float, float]:
        asked.append(calls)
        return 0.5 * calls, 0.25 * calls

    steps = {"elsewhere": Step(lambda: None, timed=elsewhere, warm=True)}
    series, _ = time_steps(steps, repeats=2, block_s=1.0)
    assert series["elsewhere"].seconds == [0.5, 0.5]
    assert asked == [1, 1] + [1, 2] * ((len(asked) - 2) // 2) and len(asked) >= 6

    slow: list[float] = []

    def here() -> None:  # each second call is slow: the one that is not timed
        begin = time.perf_counter()
        time.sleep(0.05 if len(slow) >= 2 and len(slow) % 2 == 0 else 0.001)
        slow.append(time.perf_counter() - begin)

    series, _ = time_steps({"here": Step(here, warm=True)}, repeats=2, block_s=1e-4)
    assert len(slow) % 2 == 0 and min(slow[2::2]) >= 0.05
    assert min(series["here"].seconds) < 0.05


def test_caches_of_long_texts_are_large() -> None:
    caches = [Case("decode", Size(n, 32, 8, 1, 32768, 128)) for n in (1, 8)]
    short = Case("decode", Size(1, 32, 8, 1, 4096, 128))
    assert [room.is_large(case) for case in (*caches, short)] == [True, True, False]
    way = next(iter(torch_ways(Inputs.of(SMALL[0]))))
    assert not step(way, Inputs.of(SMALL[0])).warm


def _runs(calls: list[str]) -> list[tuple[str, int]]:
    return [(key, len(list(group))) for key, group in itertools.groupby(calls)]


def test_a_training_step_runs_the_backward() -> None:
    inputs = Inputs.of(SMALL[0])
    way = next(iter(torch_ways(inputs)))
    grads = step(way, inputs).run()
    assert [g.shape for g in grads] == [inputs.q.shape, inputs.k.shape, inputs.v.shape]


def test_yardsticks_say_what_they_are() -> None:
    sticks = Yardsticks(small=True)
    for name in ("float32", "float16", "bfloat16", "read", "read"):
        sticks.sample(name)
    found = sticks.summary()
    assert set(found) == {"float32", "bfloat16", "read"} and sticks.of("float16") > 0
    assert found["read"]["unit"] == "GB/s" and len(sticks.samples["read"]) == 6
    assert ("registers" in found["float32"]["source"]) == BUILT
    assert all(s["min"] <= s["median"] <= s["max"] for s in found.values())


def test_the_record_says_all_of_a_row(record: dict) -> None:
    assert json.loads(records.dump(record)) == record and record["schema"] == records.SCHEMA
    assert [row["name"] for row in record["rows"]] == [
        quick(case).name for case in CASES if case.group == "short"
    ]
    for row in record["rows"]:
        assert row["ratio"]["min"] <= row["ratio"]["median"] <= row["ratio"]["max"]
        assert not row["wrong"] and row["torch_route"] in row["torch_routes_ms"]
        assert row["repeats"] == 2 and row["goal"] is None and "met" not in row
        gflops = row["density"] * 4 * row["batch"] * row["heads"] * row["q_len"] * row["kv_len"]
        seconds = row["ours_ms"]["median"] / 1e3
        assert row["ours_gflops"] == pytest.approx(
            gflops * row["head_dim"] / seconds / 1e9, rel=0.01
        )
    assert record["goals_met"] and record["memory"] == []


def test_long_caches_that_do_not_fit_are_said(monkeypatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda: 2.0**30)
    made = run.measure(dataclasses.replace(TINY, quick=False, repeats=2, only="(8,32/8,1x32768"))
    names = [case.name for case in CASES if "(8,32/8,1x32768" in case.name]
    assert list(made["left_out"]) == names and made["rows"] == []
    assert all("1.0 GiB are free" in why for why in made["left_out"].values())


def test_a_route_that_copies_keys_for_each_head_is_tried_where_it_fits(monkeypatch) -> None:
    inputs = Inputs.of(Case("decode", Size(1, 8, 2, 1, 64, 16)))
    assert run._near(inputs)[1].get("math", 0.0) is not None
    monkeypatch.setattr(run, "lacking", lambda case, times: "too much" if times > room.OURS else "")
    near, far = run._near(inputs)
    assert far["math"] is None and [way.name for way in near] == ["flash"]


def test_a_backend_that_does_not_run_is_not_timed_as_another(monkeypatch) -> None:
    from polyattn import settings
    from polyattn.selection import scopes

    case = Case("value", Size(1, 2, 2, 8, 8, 16))
    monkeypatch.setenv("POLYATTN_ON_UNSUPPORTED", "fallback")
    settings.reload()
    try:
        with pytest.raises(PolyattnError, match="expected sdpa_efficient"):
            ours(Inputs.of(case), "sdpa_efficient")
    finally:
        monkeypatch.undo()
        settings.reload()
        scopes.invalidate()


def test_memory_is_measured_in_another_process() -> None:
    case = memory.cases(1024)[0]
    extra = memory.extra_mib(case, BACKEND)
    scores = memory.extra_mib(dataclasses.replace(case, mask="causal"), "sdpa_math")
    if extra is None or scores is None:
        pytest.skip("this system does not tell the peak of a process")
    assert 0 <= extra < 4 <= scores  # MiB: the scores of one head alone take 4


def test_tables_show_goals_and_peers(record: dict, capsys: pytest.CaptureFixture) -> None:
    shown = json.loads(records.dump(record))
    shown["quick"] = False
    first = shown["rows"][0]
    goal = {"over": "torch", "least": 99.0, "got": 1.5, "met": False}
    first.update(goal=99.0, goals=[goal], met=False, peers={"flex": {"unable": "no"}})
    shown["left_out"] = {"a long one": "needs about 9.0 GiB, and 1.0 GiB are free"}
    report.print_record(shown)
    printed = capsys.readouterr().out
    assert "x flex" in printed and "99" in printed and "GF/s" in printed
    printed = " ".join(printed.split())
    assert f"goal missed: {first['name']}: 1.5 x torch (goal: at least 99)" in printed
    assert "a long one: not run, needs about 9.0 GiB" in printed
    shown.update(goals_of="AMD Zen 4", rows=[{**row, "goal": None} for row in shown["rows"]])
    report.print_record(shown)
    assert "goals over torch: those of AMD Zen 4" in " ".join(capsys.readouterr().out.split())


def test_plot_is_drawn(record: dict, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from polyattn.bench.plot import draw_ratios

    assert draw_ratios(record, tmp_path / "a" / "cpu.png").stat().st_size > 1000


def test_compare_takes_times_over_torch(
    record: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    slow = json.loads(records.dump(record))
    for row in slow["rows"]:
        row["relative"] = {name: value * 100 for name, value in row["relative"].items()}
    paths = [str(tmp_path / name) for name in ("a.json", "b.json", "other.json")]
    for path, content in zip(paths, (record, slow, {**record, "kind": "overhead"}), strict=True):
        records.write(content, Path(path))
    assert main(["compare", paths[0], paths[1]]) == 1
    assert "over that of torch" in " ".join(capsys.readouterr().out.split())
    assert main(["compare", paths[1], paths[0]]) == 0
    assert main(["compare", paths[0], paths[2]]) == 2
    assert "same kind" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--repeats", "1"], "at least 2"),
        (["--only", "nonsense"], "nonsense"),
        (["--quick", "--record"], "whole run"),
        (["--only", "dense", "--record"], "whole run"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "require", lambda backend: None)
    assert main(["cpu", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(BUILT, reason="the native kernels are built here")
def test_command_says_how_to_get_the_kernel(capsys: pytest.CaptureFixture) -> None:
    assert main(["cpu", "--quick"]) == 2
    assert "native_cpu" in capsys.readouterr().err


@pytest.mark.skipif(not BUILT, reason="the native kernels are not built here")
@pytest.mark.slow
def test_command_prints_and_records(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "cpu.json"
    code = main(["cpu", "--quick", "--repeats", "2", "--only", "bf16", "--record", str(path)])
    printed = capsys.readouterr().out
    written = records.read(path)
    assert code == (0 if written["goals_met"] else 1) and written["backend"] == "native_cpu"
    names = [quick(case).name for case in CASES]
    assert [row["name"] for row in written["rows"]] == [name for name in names if "bf16" in name]
    assert not any(row["wrong"] for row in written["rows"]) and "x torch" in printed
    assert written["native"]["isa"] in written["native"]["isas"]
    code = main(["cpu", "--quick", "--json", "--only", "short"])
    assert json.loads(capsys.readouterr().out)["kind"] == "cpu" and code in (0, 1)
