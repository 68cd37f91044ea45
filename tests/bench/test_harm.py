"""The harm benchmark: its problems, its calls, its verdict, its record. No figure is a test."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from polyattn import settings
from polyattn.bench import main, records
from polyattn.bench.cpu.case_arrays import Inputs
from polyattn.bench.cpu.cases import SHORT, Size
from polyattn.bench.cpu.truth import Truth
from polyattn.bench.cpu.ways import Unable, Way
from polyattn.bench.harm import calls
from polyattn.bench.harm import harm_table as report
from polyattn.bench.harm import whole_run as run
from polyattn.bench.harm.problems import UserCase, chosen, problems
from polyattn.errors import PolyattnError
from polyattn.native import module
from polyattn.selection import Source
from polyattn.selection.platforms import find_platform
from polyattn.selection.registry import Available
from polyattn.torch import explain
from polyattn.torch.admission import admit
from polyattn.tuning import Measurement, lookup

BUILT = isinstance(module.status(), Available)
TINY = "tiny decode (1,4,1x32,32) fp32"
MASKS = ("none", "causal", "window", "blocks", "padding", "causal padding")
SMALL = [
    *(
        UserCase(mask, Size(2, 4, 2, 256, 256, 16), dtype, mask, train, layout)
        for mask in MASKS
        for dtype, train, layout in (("float32", True, "BTNH"), ("float16", False, "BNTH"))
    ),
    *(
        UserCase(f"{mask} as numbers", Size(2, 4, 4, 256, 256, 16), "float32", mask, numbers=True)
        for mask in ("window", "causal padding")
    ),
]


def test_the_list_is_the_same_each_time_and_its_names_are_unique() -> None:
    listed = list(problems())
    assert listed == list(problems())
    assert len({case.name for case in listed}) == len(listed) > 300


def test_the_list_has_what_programs_call() -> None:
    listed = list(problems())
    for dtype in SHORT:
        of = [case for case in listed if case.dtype == dtype]
        assert {case.mask for case in of} == set(MASKS)
        assert {case.train for case in of} == {True, False}
        assert {case.layout for case in of} == {"BNTH", "BTNH"}
        assert {32, 40, 64, 80, 96, 128, 256} <= {case.size.head_dim for case in of}
        decode = [case.size for case in of if case.is_decode]
        assert {1, 8} <= {s.batch for s in decode}
        assert {16, 32, 128, 1024, 4096, 8192} <= {s.kv_len for s in decode}
        assert any(s.heads != s.kv_heads for s in decode)
        assert any(case.numbers for case in of)
    for case in listed:
        assert not case.train or case.useful_flops < 6e10  # the whole run is to take minutes


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(
    ("mask", "size"),
    [
        ("none", Size(1, 8, 8, 4096, 4096, 64)), ("causal", Size(1, 8, 8, 4096, 4096, 64)),
        ("none", Size(1, 16, 16, 2048, 2048, 128)), ("none", Size(8, 12, 12, 197, 197, 64)),
        ("causal", Size(1, 32, 8, 2048, 2048, 128)), ("window", Size(1, 8, 8, 4096, 4096, 64)),
        ("none", Size(1, 32, 8, 512, 512, 64)), ("none", Size(1, 32, 8, 1, 4096, 128)),
        ("none", Size(1, 32, 8, 1, 32768, 128)), ("none", Size(8, 32, 8, 1, 4096, 128)),
    ],
    ids=str,
)  # fmt: skip
def test_what_an_outside_bench_found_is_in_the_list(dtype: str, mask: str, size: Size) -> None:
    assert any((c.dtype, c.mask, c.size) == (dtype, mask, size) for c in problems())


def test_quick_is_a_tenth_of_every_kind() -> None:
    everything, some = list(problems()), chosen(quick=True)
    assert some == chosen(quick=True)
    assert {case.group for case in some} == {case.group for case in everything}
    assert {case.dtype for case in some} == set(SHORT)
    assert len(everything) / 11 < len(some) < len(everything) / 8


def test_only_takes_parts_and_wildcards() -> None:
    assert [case.name for case in chosen(TINY)] == [TINY]
    found = chosen("decode (1,32/8* bf16*")
    assert found and all(case.dtype == "bfloat16" for case in found)
    assert len(chosen(TINY, quick=True)) == 1
    with pytest.raises(PolyattnError, match="nonsense"):
        chosen("nonsense")


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_all_calls_compute_the_problem(case: UserCase) -> None:
    inputs = Inputs.of(case)
    truth = Truth(inputs)
    for way in (calls.stock(inputs), calls.drop_in(inputs), calls.by_value(inputs)):
        errors, wrong = truth.check(way)
        assert not wrong, (way.name, wrong)
        assert set(errors) == {"out", *(("query", "key", "value") if case.train else ())}


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_density_is_that_of_the_mask(case: UserCase) -> None:
    inputs = Inputs.of(case)
    full = torch.ones(2, case.size.heads, 256, 256, dtype=torch.bool)
    allowed = full if inputs.allowed is None else full & inputs.allowed
    assert case.density == pytest.approx(float(allowed.float().mean()))


def test_what_runs_is_what_the_record_says() -> None:
    inputs = Inputs.of(SMALL[0])
    found = calls.ran(calls.by_value(inputs), inputs)
    q, k, v = inputs.q, inputs.k, inputs.v
    assert found.backend == explain(q, k, v, layout=inputs.case.layout).backend
    assert found.source is Source.HEURISTIC


def test_a_backend_that_cannot_run_it_says_why() -> None:
    case = dataclasses.replace(SMALL[0], mask="window", group="window", train=False)
    found = calls.forced(Inputs.of(case), "sdpa_efficient")
    assert isinstance(found, Unable) and found.why


def _timing(*ratios: float) -> tuple[Callable[[run.Options], run.Row], list[run.Options]]:
    """Return a timer that finds these ratios one after the other, and what it was asked for."""
    left, asked = iter(ratios), []

    def measured(how: run.Options) -> run.Row:
        asked.append(how)
        return {"ratio": {"median": next(left)}}

    return measured, asked


def test_what_seems_slower_is_timed_again_for_longer() -> None:
    measured, asked = _timing(0.9, 1.02)
    assert run.settled(measured) == {"ratio": {"median": 1.02}, "seemed": 0.9}
    assert asked[1].repeats > asked[0].repeats and asked[1].block_s > asked[0].block_s
    measured, asked = _timing(1.01)
    assert run.settled(measured)["seemed"] is None and len(asked) == 1


def _row(ratio: float, foreign: float = 0.0, wrong: str = "") -> run.Row:
    return {
        "name": f"{ratio} {foreign} {wrong}",
        "ratio": {"median": ratio},
        "wrong": wrong,
        "foreign": {"median": foreign},
        "native_ratio": None,
    }


@pytest.mark.parametrize(
    ("rows", "met"),
    [
        ([_row(0.95), _row(3.0)], True),
        ([_row(0.949), _row(3.0)], False),
        ([_row(0.949, foreign=0.5), _row(3.0)], None),
        ([_row(0.949, foreign=0.5), _row(0.9)], False),
        ([_row(2.0, wrong="out: error")], False),
    ],
)
def test_the_verdict(rows: list[run.Row], met: bool | None) -> None:
    found = run.judged(rows)
    assert found["goals_met"] is met
    assert found["worst"]["ratio"] == min(row["ratio"]["median"] for row in rows)


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = calls.by_value

    def off(inputs: Inputs) -> Way:
        way = right(inputs)
        return Way(way.name, lambda q, k, v: way.call(q, k, v) * 1.001)

    monkeypatch.setattr(calls, "by_value", off)
    row = run.timed(dataclasses.replace(SMALL[0], train=False))
    assert row["wrong"].startswith("attention: out") and row["error"]["drop-in"]["out"] < 1e-6
    assert run.judged([row])["goals_met"] is False


def _measurement(backend: str, seconds: float) -> Measurement:
    return Measurement(backend, "{}", seconds, seconds, seconds, 20, 0.0, 1e-6, True)


@pytest.fixture
def tuned_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UserCase]:
    """A problem whose tuned times on this machine prefer the float64 reference."""
    monkeypatch.setenv("POLYATTN_CACHE_DIR", str(tmp_path))
    settings.reload()
    case = chosen(TINY)[0]
    inputs, platform = Inputs.of(case), find_platform("torch")
    assert platform is not None
    options = dict.fromkeys(("mask", "bias", "scale", "softcap", "sinks", "deterministic"))
    call = admit(
        inputs.q, inputs.k, inputs.v, **options, dropout_p=0.0, layout="BNTH", return_lse=False
    )
    key = lookup.key_for(call.problem, platform.device_description("cpu"), platform.versions())
    lookup.table().record(key, [_measurement("reference", 1e-7), _measurement("sdpa_flash", 1.0)])
    yield case
    monkeypatch.undo()
    settings.reload()


def test_tuned_times_take_part_only_when_asked_for(tuned_case: UserCase) -> None:
    untuned = run.measure(only=tuned_case.name)
    assert [row["chosen_by"] for row in untuned["rows"]] == ["HEURISTIC"]
    assert not untuned["tuned"] and "empty cache" in untuned["times"]
    tuned = run.measure(only=tuned_case.name, tuned=True)
    assert [(row["chosen"], row["chosen_by"]) for row in tuned["rows"]] == [("reference", "TUNED")]
    assert tuned["tuned"] and tuned["rows"][0]["ratio"]["median"] > 0


def test_a_backend_asked_for_is_no_automatic_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_BACKEND", "sdpa_math")
    settings.reload()
    try:
        with pytest.raises(PolyattnError, match="POLYATTN_BACKEND=sdpa_math"):
            run.measure(only=TINY)
    finally:
        monkeypatch.undo()
        settings.reload()


@pytest.fixture(scope="module")
def record() -> dict:
    return run.measure(only="* (4,12,128,64) bf16 BTNH")


def test_the_record_says_all_of_a_row(record: dict) -> None:
    assert json.loads(records.dump(record)) == record
    assert (record["schema"], record["kind"]) == (records.SCHEMA, "harm")
    assert record["backend"] == "automatic" and record["machine"]["cpu"] and record["date"]
    assert record["took_s"] >= 0 and not record["quick"]
    assert [row["name"].split(" (")[0] for row in record["rows"]] == [
        "dense",
        "half padding",
        "fwd+bwd dense",
        "fwd+bwd half padding",
    ]
    for row in record["rows"]:
        for ratio in (row["ratio"], *row["ratios"].values()):
            assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
        assert row["ratio"] == row["ratios"][row["call"]]
        assert row["ratio"]["median"] == min(
            row["ratios"][name]["median"] for name in ("drop-in", "attention")
        )
        assert row["processor_ratios"].keys() == row["ratios"].keys()
        assert row["chosen"] == row["choices"][row["call"]]["chosen"] and row["reason"]
        assert not row["wrong"] and row["relative"]["median"] > 0
        assert (row["native_ratio"] is not None) == BUILT == (not row["native_unable"])
        if BUILT and row["choices"]["attention"]["chosen"] == "native_cpu":
            assert row["native_ratio"] == row["ratios"]["attention"]


def test_the_table_names_the_worst_first(record: dict, capsys: pytest.CaptureFixture) -> None:
    shown = copy.deepcopy(record)
    bad, loud = shown["rows"][2], shown["rows"][1]
    for row in shown["rows"]:  # whatever this machine was busy with
        row["ratio"] = dict.fromkeys(row["ratio"], 1.5)
        row["foreign"]["median"] = 0.0
    for row, ratio, foreign in ((bad, 0.5, 0.0), (loud, 0.6, 0.5)):
        row["ratio"] = dict.fromkeys(row["ratio"], ratio)
        row["foreign"]["median"] = foreign
    shown |= run.judged(shown["rows"])
    report.print_record(shown)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"harm (below 0.95): {bad['name']} 0.50" in printed
    assert f"too busy to say: {loud['name']} 0.60" in printed
    assert f"{bad['chosen']} <- {bad['chosen_by']}: {bad['reason'][:20]}" in printed
    # The cell of lowest and highest alone: a time in milliseconds may well read 0.6.
    assert printed.index(" 0.5..0.5 ") < printed.index(" 0.6..0.6 ")


def test_two_records_can_be_compared(record: dict, tmp_path: Path) -> None:
    path = tmp_path / "harm.json"
    records.write(record, path)
    assert main(["compare", str(path), str(path)]) == 0


def test_the_command_prints_records_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "a" / "harm.json", tmp_path / "harm.png"
    code = main(["harm", "--only", TINY, "--record", str(path), "--plot", str(picture)])
    told = capsys.readouterr()
    written = records.read(path)
    assert code == {True: 0, False: 1, None: 2}[written["goals_met"]]
    assert TINY in told.out and f"1/1 {TINY}" in told.err and picture.stat().st_size > 1000
    main(["harm", "--only", TINY, "--json"])
    assert json.loads(capsys.readouterr().out)["kind"] == "harm"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nonsense"], "nonsense"),
        (["--quick", "--record"], "whole untuned run"),
        (["--tuned", "--record"], "whole untuned run"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["harm", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_interrupted_run_prints_its_rows_and_writes_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    timed, seen = run.timed, []

    def until_the_second(case: UserCase) -> run.Row:
        seen.append(case)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return timed(case)

    monkeypatch.setattr(run, "timed", until_the_second)
    path = tmp_path / "harm.json"
    code = main(["harm", "--only", "tiny decode (1,8,1x16,64)*", "--record", str(path)])
    told = capsys.readouterr()
    assert code == 130 and not path.exists()
    assert seen[0].name in " ".join(told.out.split())
    assert "interrupted" in told.err and "not written" in told.err
