"""The shipped records, and how one is made from the record of a bench."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from polyattn.errors import PolyattnError
from polyattn.selection.evidence.shipped import parse, shipped

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "evidence_record.py"
RESULTS = ROOT / "benchmarks" / "results" / "amd-epyc-avx512-bf16-2-cores"
BENCH, HARM = RESULTS / "cpu.json", RESULTS / "harm.json"
FOLDER = resources.files("polyattn.selection.evidence") / "records"


def convert(bench: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            str(bench),
            "--name",
            "made",
            "--hardware",
            "a machine",
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_what_is_shipped_says_where_it_comes_from() -> None:
    assert [one.name for one in shipped()] == sorted(one.name for one in shipped())
    for one in shipped():
        text = json.loads((FOLDER / f"{one.name}.json").read_text())
        assert text["name"] == one.name and text["made"]["date"] and one.command
        assert one.figures and one.families and one.torch and one.threads[0] <= one.threads[1]


def test_no_two_records_fit_one_machine() -> None:
    seen = set()
    for one in shipped():
        for family in one.families:
            for torch in one.torch:
                key = one.vendor, family, one.level, one.isa, torch
                assert key not in seen
                seen.add(key)


def test_the_shipped_one_of_a_bench_is_what_that_bench_says() -> None:
    made = convert(HARM)
    assert made.returncode == 0, made.stderr
    stored = json.loads((FOLDER / "amd-zen4.json").read_text())
    found = json.loads(made.stdout)
    for part in ("schema", "matches", "figures"):
        assert found[part] == stored[part]
    assert found["made"]["command"] == "`polyattn bench harm --record`"


def bench(**changes: Any) -> dict[str, Any]:
    made = json.loads(BENCH.read_text())
    machine = made["machine"] | {"vendor": "AuthenticAMD", "family": 25}
    return {**made, "machine": machine, **changes}


def row(**changes: Any) -> dict[str, Any]:
    plain = copy.deepcopy(json.loads(BENCH.read_text())["rows"][0])
    return {**plain, "peers": {}, **changes}


def spread(median: float) -> dict[str, float]:
    return {"median": median, "q1": median * 0.9, "q3": median * 1.1, "min": 0.1, "max": 9.0}


def test_rows_are_told_by_kind_and_what_is_wrong_or_small_is_left_out(tmp_path: Path) -> None:
    rows = [
        *(row(ratio=spread(x)) for x in (1.2, 1.4, 1.3, 1.1)),
        row(ratio=spread(0.1), wrong="out"),
        row(ratio=spread(0.1), q_len=8, kv_len=8, mask="causal"),
        row(ratio=spread(0.9), q_len=8, kv_len=8),
        row(ratio=spread(7.0), mask="window"), row(ratio=spread(2.0), mask="causal"),
        row(ratio=spread(3.0), train=True),
        row(ratio=spread(40.0), q_len=1, kv_heads=2, peers={"folded": {"ratio": spread(4.0)}}),
        row(ratio=spread(5.0), q_len=1), row(ratio=spread(0.5), dtype="bfloat16", head_dim=128),
    ]  # fmt: skip
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(bench(rows=rows)))
    made = convert(path, "--threads", "1", "8", "--note", "known by its plate")
    assert made.returncode == 0, made.stderr
    found = parse(made.stdout, "made.json")
    assert (found.vendor, found.families, found.level, found.isa, found.torch, found.threads) == (
        "AuthenticAMD",
        (25,),
        "avx512bf16",
        "avx512bf16",
        ("2.13",),
        (1, 8),
    )
    figures = {key: (one.low, one.median, one.high) for key, one in found.figures.items()}
    assert figures["float32", "dense"] == (1.1, 1.25, 1.4)  # over the problems
    assert figures["float32", "causal"] == (1.8, 2.0, 2.2)  # of one: over its repeats
    assert figures["float32", "grouped decode"][1] == 4.0  # against what would run instead
    assert figures["float32", "decode"][1] == 5.0 and figures["float32", "train"][1] == 3.0
    assert figures["bfloat16", "wide"][1] == 0.5 and len(figures) == 7
    assert figures["float32", "small"][1] == 0.9


def test_of_bench_harm_the_times_of_the_kernels_count_whatever_was_chosen(tmp_path: Path) -> None:
    rows = [
        row(ratio=spread(1.0), native_ratio=spread(0.7), q_len=1),
        row(ratio=spread(1.0), native_ratio=None, train=True),
    ]
    native = bench()["native"] | {"bfloat16": {"form": "avx512", "why": "", "peaks_gflops": {}}}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(bench(rows=rows, backend="automatic", native=native)))
    found = parse(convert(path).stdout, "made.json")
    assert {key: one.median for key, one in found.figures.items()} == {("float32", "decode"): 0.7}
    assert (found.isa, found.bfloat16) == ("avx512bf16", "avx512")


def test_what_is_no_evidence_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    for changes in ({"quick": True}, {"backend": "flex"}, {"native": None}):
        path.write_text(json.dumps(bench(**changes)))
        assert "neither is evidence" in convert(path).stderr
    nameless = bench(machine={"flags": bench()["machine"]["flags"]})
    path.write_text(json.dumps(nameless))
    done = convert(path)
    assert done.returncode == 2 and "--vendor" in done.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "polyattn.evidence/9"}, {"figures": {"float32": {"odd": {}}}},
        {"figures": {"float64": {"dense": {"problems": 1, "low": 1, "median": 1, "high": 1}}}},
        {"figures": {"float32": {"dense": {"problems": 1, "low": 2, "median": 1, "high": 3}}}},
        {"figures": {"float32": {"dense": {"problems": 0, "low": 1, "median": 1, "high": 1}}}},
        {"matches": {}}, {"made": None},
    ],
)  # fmt: skip
def test_a_record_that_makes_no_sense_is_an_error(change: dict[str, Any]) -> None:
    text = json.loads((FOLDER / "amd-zen4.json").read_text()) | change
    with pytest.raises(PolyattnError, match=r"got odd.json.*evidence_record.py"):
        parse(json.dumps(text), "odd.json")
    for garbage in ("", "[]", "3", "{}"):
        with pytest.raises(PolyattnError, match="expected a record of evidence"):
            parse(garbage, "odd.json")
