"""`trace_any` of programs that call a part of a model before the model: the model is recorded."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

from polyattn.hooks import trace, trace_any, trace_step
from polyattn.trace import Record, Trace, read

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Both(nn.Module):
    """An encoder and a decoder, as those whose `generate` encodes once and decodes often."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        out: Tensor = self.decoder(self.encoder(x) if encoded is None else encoded + x)
        return out


def generated(model: Both) -> None:
    encoded = model.encoder(X)
    for step in range(3):
        with trace_step(step):
            model(X * step, encoded)
    model.encoder(X + 1)
    model(X)


def alike(one: Trace) -> list[Record]:
    """The records but for which of them say that they are the same as another."""
    return [replace(record, same=None) for record in one.records]


def files(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*"))


@pytest.mark.parametrize("steps", [None, {1, 2}])
@pytest.mark.parametrize("whole", [None, "encoder"])
def test_it_is_the_trace_of_the_whole_model(tmp_path: Path, steps: Any, whole: Any) -> None:
    if whole is not None:
        pytest.importorskip("safetensors")
    model = Both()
    options = {"steps": steps, "parameters": True}
    with torch.no_grad(), trace(model, tmp_path / "a.jsonl", tensors=whole, **options):
        generated(model)
    folder = tmp_path / "any"
    tensors = whole and (lambda name, module: isinstance(module, nn.Sequential))
    with torch.no_grad(), trace_any(folder / "b.jsonl", tensors=tensors, **options) as traced:
        generated(model)
    assert [path.name for path in traced.paths] == ["b.jsonl"] and not traced.left_out
    expected, found = read(tmp_path / "a.jsonl"), read(folder / "b.jsonl")
    plain = [replace(one, file=None) for one in alike(found)]
    assert plain == [replace(one, file=None) for one in alike(expected)]
    assert found.header.modules == expected.header.modules and set(found.header.weights) == {
        name for name, _ in model.named_parameters()
    }
    assert found.ended and not found.notes
    kept = {one.file for one in found.records if one.file is not None}
    assert all((folder / one).is_file() for one in kept) and bool(kept) is (whole is not None)
    assert set(files(folder)) - kept - {"b.tensors"} == {"b.jsonl"}


def test_several_parts_come_one_after_the_other(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = Both()
    with torch.no_grad(), trace_any(tmp_path / "run.jsonl", tensors=".*") as traced:
        model.encoder(X)
        model.decoder(X)
        model.encoder(X)
        assert [path.name for path in traced.paths] == ["run.jsonl", "run.Sequential.jsonl"]
        model(X)
        model.decoder(X)
    assert [path.name for path in traced.paths] == ["run.jsonl"]
    found = read(tmp_path / "run.jsonl")
    calls = [(r.module, r.call) for r in found.records if r.tensor == "out" and "." not in r.module]
    assert calls == [
        ("encoder", 0),
        ("encoder", 1),
        ("decoder", 0),
        ("encoder", 2),
        ("decoder", 1),
        ("", 0),
        ("decoder", 2),
    ]
    assert [one.seq for one in found.records] == list(range(len(found.records)))
    from safetensors.torch import load_file

    for record in found.records:
        path = found.file_of(record)
        assert path is not None
        whole = load_file(path)["tensor"]
        assert whole.shape == record.shape and float(whole.max()) == pytest.approx(record.max)


def test_a_model_around_a_model(tmp_path: Path) -> None:
    """Layers that are called one by one, then a block of them, then all."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2))
    with torch.no_grad(), trace_any(tmp_path / "run.jsonl") as traced:
        model[0][0](X)
        model[0](X)
        model(X)
    names = [r.module for r in read(tmp_path / "run.jsonl").records if r.tensor == "out"]
    assert names == ["0.0", "0.0", "0.1", "0", "0.0", "0.1", "0", "1", ""]
    assert files(tmp_path) == ["run.jsonl"] and len(traced.runs) == 1


def test_a_model_with_all_the_layers_of_what_ran_before(tmp_path: Path) -> None:
    """As features cut from a classifier: they have no name in it, so the file of theirs stays."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    features = nn.Sequential(*list(model.children())[:2])
    with torch.no_grad(), trace_any(tmp_path / "run.jsonl") as traced:
        features(X)
        model(X)
        features(X)
    assert [path.name for path in traced.paths] == ["run.jsonl", "run.Sequential.jsonl"]
    first, second = map(read, traced.paths)
    assert first.ended and [r.module for r in first.records if r.tensor == "out"] == ["0", "1", ""]
    names = [r.module for r in second.records if r.tensor == "out"]
    assert names == ["0", "1", "2", "", "0", "1"] and not traced.left_out


def test_parts_that_are_cut_from_a_model_do_not_end_its_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    with caplog.at_level(logging.WARNING), trace_any(tmp_path / "run.jsonl") as traced:
        model(X)
        for _ in range(2):
            model[:2](X)  # a new module each time, of the model's own
        model(X)
    found = read(tmp_path / "run.jsonl")
    assert len(traced.runs) == 1 and {one.model for one in traced.left_out} == {"Sequential"}
    assert [r.call for r in found.records if (r.module, r.tensor) == ("0", "out")] == [0, 1, 2, 3]
    assert [r.call for r in found.records if (r.module, r.tensor) == ("", "out")] == [0, 1]


def test_a_model_that_is_traced_in_part_by_someone_else(tmp_path: Path) -> None:
    """It is left out, and nothing that is recorded ends."""
    model = Both()
    with torch.no_grad(), trace_any(tmp_path / "run.jsonl") as traced:
        model.encoder(X)
        with trace(model.decoder, tmp_path / "own.jsonl"):
            model(X)
        model.encoder(X)
    assert "traced into" in traced.left_out[0].reason and len(traced.runs) == 1
    calls = [r.call for r in read(tmp_path / "run.jsonl").records if r.module == "0"]
    assert sorted(set(calls)) == [0, 1, 2]


def test_layers_that_the_whole_model_does_not_have(tmp_path: Path) -> None:
    model = Both()
    with torch.no_grad(), trace_any(tmp_path / "run.jsonl", layers="^0$") as traced:
        model.encoder(X)
        model(X)
    found = read(tmp_path / "run.jsonl")
    assert [r.module for r in found.records if r.tensor == "out"] == ["0", "0"]
    assert [one.model for one in traced.left_out] == ["Both"]


def test_weights_are_perturbed_once(tmp_path: Path) -> None:
    model = Both()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with torch.no_grad(), trace_any(tmp_path / "run.jsonl", perturb=1):
        model.encoder(X)
        moved = model.encoder[0].weight.clone()
        model(X)
        assert moved.equal(model.encoder[0].weight) and not moved.equal(before["encoder.0.weight"])
        assert not model.decoder[0].weight.equal(before["decoder.0.weight"])
    assert all(p.equal(before[name]) for name, p in model.named_parameters())
    assert read(tmp_path / "run.jsonl").header.selection["perturb"] == 1


def test_a_trace_of_the_model_that_cannot_begin_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyattn.errors import TraceError
    from polyattn.trace.recorders.torch import any_program

    model, original = Both(), any_program.ActivationTrace

    def fails(module: nn.Module, path: Path, **options: Any) -> Any:
        if module is model:
            raise TraceError("got no room")
        return original(module, path, **options)

    monkeypatch.setattr(any_program, "ActivationTrace", fails)
    with torch.no_grad(), trace_any(tmp_path / "run.jsonl") as traced:
        model.encoder(X)
        model(X)
    found = read(tmp_path / "run.jsonl")
    assert found.ended and found.header.modules[""] == "Sequential" and len(found.records) == 6
    assert traced.left_out[0].reason == "got no room" and files(tmp_path) == ["run.jsonl"]
