"""bench trace: bugs are where they are said to be, and the suite counts what is true."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from torch import nn

from polyattn.bench import main, records
from polyattn.bench.trace.bench_trace import Options
from polyattn.hooks import trace
from polyattn_faults import faults, seeding
from polyattn_faults.answers import Reference, answer
from polyattn_faults.architectures import ARCHITECTURES
from polyattn_faults.edits import EDITS
from polyattn_faults.faults import summary
from polyattn_faults.operations import Call, changed, observed


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x * 2).relu() * 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_operations_of_a_modules_own_code(tmp_path: Path) -> None:
    """A child's are its own, a hook's are nobody's, and a trace changes nothing of that."""
    model, x = Twice(), torch.randn(2, 4)
    model.inner.register_forward_hook(lambda module, args, out: out + 0)
    before = {name: dict(vars(one)) for name, one in model.named_modules()}
    seen: list[Call] = []
    with observed(model, seen.append):
        model(x)
    names = [(call.module, call.name, call.index) for call in seen]
    assert names == [
        ("", "mul", 0),
        ("inner", "linear", 0),
        ("", "call", 0),
        ("", "relu", 0),
        ("", "mul", 1),
        ("", "add", 0),
    ]
    assert seen[2].child == "inner" and seen[3].origin(seen[3].args[0])[0] == "call:inner"
    assert seen[0].origin(x)[0] == "in" and seen[-1].origin(x)[0] == "in"
    again: list[Call] = []
    with trace(model, tmp_path / "run.jsonl"), observed(model, again.append):
        model(x)
    assert [(call.module, call.name, call.index) for call in again] == names
    assert {name: dict(vars(one)) for name, one in model.named_modules()} == before


def test_one_operation_is_changed() -> None:
    model, x = Twice(), torch.randn(2, 4)
    right = model(x)
    with changed(model, "", "mul", 1, lambda call: call.args[0] * 5):
        wrong = model(x)
    torch.testing.assert_close((wrong - x) / 5, (right - x) / 3)
    assert model(x).equal(right) and model.inner(x).shape == x.shape


@contextmanager
def reference(name: str, folder: Path) -> Iterator[tuple[Reference, nn.Module, dict[str, Any]]]:
    model, inputs = ARCHITECTURES[name].build(0, torch.float32)
    yield Reference(model, inputs, torch.float32, folder), copy.deepcopy(model), inputs


def test_bugs_with_and_without_an_effect(tmp_path: Path) -> None:
    """Of the same kind one is counted and named, and one that changes nothing is not counted."""
    with reference("gpt2", tmp_path) as (right, port, inputs):
        found = seeding.faults(port, inputs, of_kind=99, every_layer=99, seed=0)
        by_place = {(one.kind, one.at): one for one in found}
        rows = by_place["two rows exchanged", "transformer.h.1.mlp.c_fc"]
        row = answer(right, port, rows)
        assert row["counted"] and row["outcome"] == "exact" and "parameter" in row["said"]
        # nobody looks at the block's input again
        row = answer(right, port, by_place["residual in place", "transformer.h.0: add 0"])
        assert row["outcome"] == "missed" and not row["counted"] and row["output"] == 0
    assert len({one.kind for one in found}) > 35


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_read_once(dtype: torch.dtype, tmp_path: Path) -> None:
    """It is the same for each port: neither recorded nor read again."""
    model, inputs = ARCHITECTURES["vit"].build(0, dtype)
    right = Reference(model, inputs, dtype, tmp_path)
    (tmp_path / "reference.jsonl").unlink()
    assert right.verdict(copy.deepcopy(model)).equal


def test_the_same_seed_gives_the_same_bugs() -> None:
    model, inputs = ARCHITECTURES["vit"].build(0, torch.float32)
    chosen = [
        [
            (one.kind, one.at)
            for one in seeding.faults(model, inputs, of_kind=1, every_layer=2, seed=seed)
        ]
        for seed in (0, 0, 1)
    ]
    assert chosen[0] == chosen[1] != chosen[2]
    layers = {at.split(".")[2] for kind, at in chosen[0] if kind == "heads swapped"}
    assert len(layers) == 2  # one each in two layers


def test_the_same_seed_gives_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ran before: dropout that is left on is random."""
    original = faults.faults

    def dropout(*args: Any, **kwargs: Any) -> list[seeding.Fault]:
        return [one for one in original(*args, **kwargs) if one.kind.startswith("dropout")] * 3

    monkeypatch.setattr(faults, "faults", dropout)
    rows = [faults.of_architecture("gpt2", "float32", Options(quick=True)) for _ in range(2)]
    assert rows[0] == rows[1] and rows[0][0]["effect"] > 0.1


def test_sums_and_goals() -> None:
    def row(outcome: str, **more: Any) -> dict[str, Any]:
        return {
            "kind": "k",
            "dtype": "float32",
            "outcome": outcome,
            "counted": True,
            "renamed": False,
        } | more

    rows = [row("exact")] * 98 + [row("other"), row("missed"), row("missed", counted=False)]
    clean = row("same", clean=True) | {"counted": None}
    found = summary([*rows, clean], "float32")
    assert found["met"] and found["seeded"] == 100 and found["without_effect"] == 1
    assert not summary([*rows, row("cannot say"), clean], "float32")["met"]
    assert not summary([*rows, clean | {"outcome": "flagged"}], "float32")["met"]
    assert not summary([], "float32")["met"]


@pytest.mark.parametrize(("model", "dtype"), [("llama", "float32"), ("vit", "bfloat16")])
def test_the_command(model: str, dtype: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "trace.json"
    asked = ["trace", "--only", "faults", "--quick", "--models", model, "--dtype", dtype]
    assert main([*asked, "--json", str(path)]) == 0
    text = capsys.readouterr().out
    record = records.read(path)
    sums = record["faults"]["sums"][dtype]
    assert sums["seeded"] >= 8 and sums["clean"] >= 9 and sums["flagged"] == 0
    assert f"{sums['exact']} of {sums['seeded']} bugs" in text and "goal 0): met" in text
    assert "softmax" in text and json.loads(path.read_text())["flags"]["torch"]
    for row in record["rows"]:
        assert row.get("clean") or (row["culprits"] and row["at"])


def test_what_means_nothing_is_refused(capsys: Any) -> None:
    assert main(["trace", "--only", "faults", "--models", "lama"]) == 2
    assert "llama" in capsys.readouterr().err
    assert main(["trace", "--quick", "--record"]) == 2


@pytest.mark.slow
def test_every_kind_is_possible_somewhere() -> None:
    kinds: set[str] = set()
    for architecture in ARCHITECTURES.values():
        model, inputs = architecture.build(0, torch.float32)
        kinds |= {f.kind for f in seeding.faults(model, inputs, of_kind=1, every_layer=1, seed=0)}
    assert kinds == {kind.name for kind in (*seeding.KINDS, *EDITS)}
