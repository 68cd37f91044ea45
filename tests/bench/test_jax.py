"""``bench jax``: its rows, its check of results, its record, its codes. No figure is a test."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import torch

from polyattn.bench import main, records
from polyattn.bench.cpu.case_arrays import Inputs
from polyattn.bench.cpu.cases import Case, Size
from polyattn.bench.cpu.truth import Truth
from polyattn.bench.jax import choosing, footprint, jax_run, tapping
from polyattn.bench.jax.jax_cases import CASES, chosen
from polyattn.bench.jax.jax_table import print_record
from polyattn.bench.jax.jax_ways import JaxInputs, ours, stock, to_jax, to_torch, way
from polyattn.errors import PolyattnError

SMALL = Size(1, 4, 2, 64, 64, 16)
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "jax.md").read_text(encoding="utf-8")


def case(mask: str = "none", dtype: str = "float32", train: bool = False) -> Case:
    return Case("small", SMALL, dtype, mask, train, layout="BTNH")


def test_rows_have_names_of_their_own() -> None:
    assert len({each.name for each in CASES}) == len(CASES)
    assert [each.name for each in chosen("decode", False)] == [
        "decode (1,32/8,1x32768,128) fp32 BTNH", "decode (1,32/8,1x32768,128) bf16 BTNH",
    ]  # fmt: skip
    with pytest.raises(PolyattnError, match="expected a part of one of"):
        chosen("nothing", False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_cross_unchanged(dtype: str) -> None:
    x = torch.randn(3, 5).to(getattr(torch, dtype))
    crossed = to_jax(x)
    assert crossed.dtype == dtype and torch.equal(to_torch(crossed), x)


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("train", [False, True])
def test_the_check_takes_what_is_right_and_finds_what_is_wrong(mask: str, train: bool) -> None:
    inputs = Inputs.of(case(mask, train=train))
    given, truth = JaxInputs(inputs), Truth(inputs)
    assert truth.check(way("right", ours(given)))[1] == ""
    assert truth.check(way("stock", stock(inputs.case)))[1] == ""

    def wrong(q: Any, k: Any, v: Any) -> Any:
        return ours(given)(q, k, v) * 1.01

    assert truth.check(way("wrong", wrong))[1]


def test_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    row = jax_run.timed(case(), repeats=2, block_s=0.001)
    assert not row["wrong"] and row["ratio"]["median"] > 0
    assert set(row["others_ms"]).isdisjoint({row["chosen"], "jax_reference"})
    record = jax_run.measure(only="tiny", quick=True, repeats=2)
    assert record["goals_met"] is None and len(record["rows"]) == 2
    print_record(record)
    assert "x jax.nn" in capsys.readouterr().out


def test_memory_tells_linear_from_quadratic() -> None:
    found = {row["name"]: row for row in footprint.rows(512)}
    assert found["jax.nn"]["grows"] > 3.5
    assert found["jax_reference"]["mib"][0] > 0


def test_tracing_is_told() -> None:
    row = choosing.row()
    assert row["new_ms"] > 0 and row["goal_ms"] == choosing.MOST_MS


def test_taps_are_told() -> None:
    row = tapping.row()
    assert row["large_us"] > 0 and row["goal_us"] == tapping.MOST_US


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "jax.json"
    code = main(["jax", "--quick", "--only", "tiny", "--repeats", "2", "--record", str(file)])
    assert code == 2 and records.read(file)["kind"] == "jax"
    capsys.readouterr()
    main(["jax", "--quick", "--only", "tiny", "--repeats", "2", "--json"])
    assert json.loads(capsys.readouterr().out)["versions"]["jax"] == jax.__version__
    assert main(["jax", "--quick", "--record"]) == 2
    assert main(["jax", "--repeats", "1"]) == 2


def test_the_page_says_what_the_record_says() -> None:
    record = json.loads((RESULTS / "amd-epyc-avx512-bf16-2-cores" / "jax.json").read_text("utf-8"))
    over = {
        train: [row["over_torch"]["median"] for row in record["rows"] if row["train"] == train]
        for train in (False, True)
    }
    said = re.search(
        r"They take ([\d.]+) to ([\d.]+) times as long .*? and ([\d.]+) to ([\d.]+)\s+times with",
        PAGE, re.DOTALL,
    )  # fmt: skip
    assert said is not None
    known = [round(f(over[train]), 1) for train in (False, True) for f in (min, max)]
    assert [float(one) for one in said.groups()] == known
    rows = {row["name"]: row for row in record["rows"]}
    for first, kind, at in (("dense", "fp32", 1), ("dense", "bf16", 2), ("window 256", "fp32", 1)):
        row = rows[f"{first} (1,8,4096,64) {kind} BTNH"]
        line = next(x for x in PAGE.splitlines() if x.startswith(f"| {first} (1,8,4096,64)"))
        told = float(line.split("|")[at + 1])
        assert abs(told - row["ratio"]["median"]) <= 0.05 * told


def test_the_page_says_what_the_other_processors_record_says() -> None:
    folder = RESULTS / "intel-r-xeon-r-processor-avx512-bf16-amx-2-cores"
    rows = json.loads((folder / "jax.json").read_text("utf-8"))["rows"]
    ratios = {row["name"]: row["ratio"]["median"] for row in rows}
    text = " ".join(PAGE[PAGE.index("On two cores of an Intel Xeon") :].split())
    cases = (
        (r"dense ([\d.]+),", "dense (1,8,4096,64) bf16"),
        (r"causal ([\d.]+),", "causal (1,8,4096,64) bf16"),
        (r"GQA prefill ([\d.]+),", "GQA prefill (1,32/8,2048,64) bf16"),
        (r"backward ([\d.]+) and", "fwd+bwd dense (1,8,4096,64) bf16"),
        (r"float32 ([\d.]+),", "dense (1,8,4096,64) fp32"),
        (r"the window ([\d.]+) and", "window 256 (1,8,4096,64) fp32"),
        (r"decoding ([\d.]+) and", "decode (1,32/8,1x32768,128) fp32"),
    )
    for pattern, name in cases:
        said = re.search(pattern, text)
        assert said is not None, pattern
        told, known = float(said[1]), ratios[f"{name} BTNH"]
        assert abs(told - known) <= 0.05 * known, (name, told, known)
