"""The goals of ``bench cpu``: whose they are, and when one is met."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

from polyattn.bench.cpu import bench_cpu as run
from polyattn.bench.cpu.cases import CASES
from polyattn.bench.cpu.goals import AMX, OTHERS, ZEN4, processors_like, verdicts
from polyattn.bench.cpu.room import free_bytes, lacking, need_bytes
from polyattn.bench.cpu.yardsticks import Yardsticks

ROOT = Path(__file__).resolve().parents[2]


def test_the_goals_are_those_of_the_issue() -> None:
    assert ZEN4.over_torch == {
        "dense (1,8,4096,64)": (1.4, 2.6),
        "dense (1,16,2048,128)": (1.3, 2.5),
        "ViT (8,12,197,64)": (1.3, 2.4),
        "short (2,12,512,64)": (1.2, 2.0),
        "causal (1,8,4096,64)": (1.6, 2.8),
        "window 256 (1,8,4096,64)": (18.0, 30.0),
        "90% block-sparse (1,8,4096,64)": (15.0, 28.0),
        "half padding (4,8,2048,64)": (2.6, 5.2),
        "GQA prefill (1,32/8,2048,64)": (1.3, 2.4),
        "fwd+bwd dense (1,8,4096,64)": (1.4, 2.0),
        "fwd+bwd window 256 (1,8,4096,64)": (17.0, 22.0),
    }
    assert AMX.over_torch == {
        "dense (1,8,4096,64)": (1.3, 2.0),
        "dense (1,16,2048,128)": (1.2, 1.8),
        "ViT (8,12,197,64)": (1.3, 2.0),
        "causal (1,8,4096,64)": (1.5, 2.2),
        "window 256 (1,8,4096,64)": (18.0, 20.0),
        "90% block-sparse (1,8,4096,64)": (15.0, 20.0),
        "fwd+bwd dense (1,8,4096,64)": (1.3, 1.8),
        "fwd+bwd window 256 (1,8,4096,64)": (15.0, 18.0),
    }
    assert (ZEN4.over_peers, AMX.over_peers, OTHERS.over_peers) == (1.1, 1.3, 1.1)
    timed = {f"{case.group} {case.size}" for case in CASES}
    assert {*ZEN4.over_torch, *AMX.over_torch} <= timed


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "kind"),
    [
        ("AuthenticAMD", 25, ["avx2", "avx512f", "avx512_bf16"], ZEN4),
        ("AuthenticAMD", 25, ["avx2"], OTHERS),  # Zen 3
        ("AuthenticAMD", 26, ["avx2", "avx512f", "avx512_bf16"], OTHERS),  # Zen 5
        ("GenuineIntel", 6, ["avx512f", "avx512_bf16", "amx_tile", "amx_bf16"], AMX),
        ("GenuineIntel", 6, ["avx2", "avx512f"], OTHERS),
        ("ARM", 0xD4F, ["asimd", "sve"], OTHERS),
        (None, None, [], OTHERS),
    ],
)
def test_goals_over_torch_count_on_the_processors_they_were_stated_for(
    vendor, family, flags, kind
) -> None:
    machine = {"vendor": vendor, "family": family, "flags": flags}
    assert processors_like(machine) is kind
    cases = run.chosen(run.Options(only="dense (1,8"), kind)
    wanted = [kind.goal("dense (1,8,4096,64)", case.dtype) for case in cases if not case.train]
    assert [case.goal for case in cases if not case.train] == wanted
    assert any(wanted) == (kind is not OTHERS)


def _row(**changed) -> dict:
    row = {
        "q_len": 1, "dtype": "bfloat16", "goal": None, "ratio": {"median": 3.0}, "ours_share": 0.9,
        "peers": {
            "paged": {"ratio": {"median": 1.1}, "wrong": ""},
            "int8": {"ratio": {"median": 0.5}, "wrong": ""},
            "fp8": {"ratio": {"median": 0.58}, "wrong": ""},
            "vllm": {"ratio": {"median": 1.2}, "wrong": ""},
            "ncnn": {"ratio": {"median": 0.2}, "wrong": "out: error"},
            "jax": {"unable": "not installed"},
        },
    }  # fmt: skip
    return row | changed


def _met(row: dict, *, peers: bool = True, kind=ZEN4) -> dict[str, bool]:
    return {one["over"]: one["met"] for one in verdicts(row, kind, peers=peers)}


def test_decoding_is_judged_by_the_read_rate_pages_codes_and_peers() -> None:
    wanted = {
        "read rate", "contiguous", "bfloat16 (int8)", "bfloat16 (fp8)", "best peer, vllm",
    }  # fmt: skip
    assert _met(_row()) == dict.fromkeys(wanted, True)
    assert not _met(_row(ours_share=0.84))["read rate"]
    for name, over, slow in (
        ("paged", "contiguous", 1.16), ("int8", "bfloat16 (int8)", 0.6),
        ("fp8", "bfloat16 (fp8)", 0.6), ("vllm", "best peer, vllm", 1.09),
    ):  # fmt: skip
        row = _row()
        row["peers"][name]["ratio"]["median"] = slow
        assert [key for key, met in _met(row).items() if not met] == [over]
    row = _row()
    row["peers"]["paged"]["wrong"] = row["peers"]["int8"]["wrong"] = "out: error"
    assert [key for key, met in _met(row).items() if not met] == ["contiguous", "bfloat16 (int8)"]
    assert set(_met(_row(dtype="float32"), peers=False)) == {"read rate", "contiguous"}


def test_other_rows_are_judged_over_torch_and_the_best_that_is_right() -> None:
    row = _row(q_len=64, goal=2.6, peers=_row()["peers"] | {"paged": {"unable": "prefill"}})
    row["peers"] = {name: row["peers"][name] for name in ("vllm", "ncnn", "jax")}
    assert _met(row) == {"torch": True, "best peer, vllm": True}
    assert _met(row, peers=False) == {"torch": True}
    assert not _met(row | {"ratio": {"median": 2.59}})["torch"]
    assert _met(row, kind=AMX) == {"torch": True, "best peer, vllm": False}  # 1.2 of 1.3
    alone = row | {"peers": {}, "ratio": {"median": 1.0}, "goal": None}
    assert _met(alone) == {"best peer, torch": False}


def test_the_read_rate_is_the_median_of_the_run() -> None:
    case = next(c for c in CASES if c.is_decode)
    sticks = Yardsticks(small=True)
    sticks.samples = {"read": [29.0, 30.0, 90.0], "float32": [200.0, 230.0, 100.0]}
    assert sticks.of("read") == 30.0 and sticks.of("float32") == 230.0
    ms = {"median": case.kv_bytes / 27e9 * 1e3}
    row = {**_row(peers={}), "ours_ms": ms, "torch_ms": ms, "wrong": ""}
    run._judge(row, case, sticks, OTHERS, peers=False)
    assert row["ours_gbs"] == pytest.approx(27) and row["ours_share"] == pytest.approx(0.9)
    assert row["met"] and row["limit"] == "read rate"
    row["wrong"] = "out: error"
    run._judge(row, case, sticks, OTHERS, peers=False)
    assert not row["met"]
    quick = {**_row(peers={}), "ours_ms": ms, "torch_ms": ms, "wrong": ""}
    run._judge(quick, case, sticks, None, peers=False)
    assert "met" not in quick and "goals" not in quick


def test_room_is_that_of_the_longest_caches() -> None:
    long = max(CASES, key=need_bytes_of)
    assert need_bytes_of(long) > 8 * 2**30 and "8.0 GiB are free" in lacking(long, 4, 8 * 2**30)
    assert lacking(long, 4, 64 * 2**30) == "" and lacking(CASES[0], 4, 0.0) == ""
    assert free_bytes() > 0


def need_bytes_of(case) -> float:
    return need_bytes(case, 4)


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "scripts")  # as Python does for a script that it runs
        yield importlib.import_module("readme_tables")


def test_every_record_has_tables_of_its_own(tables, tmp_path: Path, monkeypatch) -> None:
    kept = ROOT / "benchmarks" / "results" / "amd-epyc-avx512-bf16-2-cores"
    record = json.loads((kept / "cpu.json").read_text())
    others = set(record["engines"]) - {"torch"}
    record["engines"] = {}
    for row in record["rows"]:
        row["peers"] = {name: x for name, x in row["peers"].items() if name not in others}
    both = {}
    for folder, cpu in (("a-first", "First"), ("b-second", "Second")):
        made = json.loads(json.dumps(record))
        made["machine"]["cpu"] = cpu
        both[folder] = made
    both["b-second"]["engines"] = {
        "vllm": {"versions": {"vllm": "0.32"}}, "ncnn": {"unable": "not installed"},
    }  # fmt: skip
    peer = {"ms": {"median": 1.0}, "ratio": {"median": 1.23}, "wrong": "", "error": {}}
    for row in both["b-second"]["rows"]:
        row["peers"]["vllm"] = peer
    for folder, made in both.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "cpu.json").write_text(json.dumps(made))
        (tmp_path / folder / "peers.md").write_text(f"by hand, {folder}")
    (tmp_path / "b-second" / "limits.json").write_text('{"limits": {"dense": ["one", "two"]}}')
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    first, second = tables.cpu().split("### Second")
    assert first.startswith("### First") and "by hand, a-first" in first and "| vllm |" not in first
    assert "by hand" not in second and "vllm 0.32" in second and "ncnn: not installed." in second
    assert "best peer, vllm >= 1.1: met" in second and "| 1.23 |" in second
    dense = [line for line in second.splitlines() if line.startswith("| dense (1,8,4096,64)")]
    assert dense[0].endswith("| one |") and dense[1].endswith("| two |")
