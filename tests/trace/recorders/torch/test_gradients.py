"""Gradients, parameters, whole tensors, checkpointing, and programs that know of no trace."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.utils.checkpoint import checkpoint

from polyattn.errors import MissingDependency, TraceError
from polyattn.hooks import trace, trace_any
from polyattn.trace import read
from tests.trace.recorders.torch.traced_models import Block, llama, one, places, recorded, tokens

X = torch.ones(2, 8)


def test_gradients(tmp_path: Path) -> None:
    model = Block()
    x = torch.randn(2, 8, requires_grad=True)
    path = tmp_path / "run.jsonl"
    with trace(model, path, gradients=True):
        seen: list[torch.Tensor] = []
        y = model.first(x)
        y.register_hook(seen.append)
        z = model.second(y.relu())
        z.square().sum().backward()
        expected = {"first": (x.grad, seen[0]), "second": (None, 2 * z)}
    found = read(path)
    assert [r.phase for r in found.records][-4:] == ["grad_out", "grad_in", "grad_out", "grad_in"]
    assert one(found, "first", "grad_in", "args[0]").l2 == pytest.approx(
        expected["first"][0].double().norm().item(), rel=1e-6
    )
    for name in ("first", "second"):
        assert one(found, name, "grad_out", "out").l2 == pytest.approx(
            expected[name][1].double().norm().item(), rel=1e-6
        )
    assert found.ended and not found.notes


def test_gradients_of_a_leaf_that_is_used_again(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    x = torch.ones(1, 4, requires_grad=True)
    with trace(model, tmp_path / "run.jsonl", gradients=True):
        for _ in range(3):
            model(x)
        model(x).sum().backward()
    found = [r for r in read(tmp_path / "run.jsonl").records if r.phase == "grad_in"]
    assert [r.call for r in found] == [3]
    assert not x._backward_hooks


def test_gradients_leave_a_module_before_they_come_to_the_one_that_made_the_tensor(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with trace(model, tmp_path / "run.jsonl", gradients=True):
        model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    found = [r for r in read(tmp_path / "run.jsonl").records if r.phase.startswith("grad")]
    assert [(r.module, r.phase) for r in found] == [
        ("", "grad_out"),
        ("2", "grad_out"),
        ("2", "grad_in"),
        ("1", "grad_out"),
        ("1", "grad_in"),
        ("0", "grad_out"),
        ("0", "grad_in"),
        ("", "grad_in"),
    ]


def test_gradients_around_a_change_in_place(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    with trace(model, tmp_path / "run.jsonl", gradients=True):
        model(torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()).sum().backward()
    found = read(tmp_path / "run.jsonl")
    phases = {(r.module, r.phase) for r in found.records if r.phase.startswith("grad")}
    assert ("1", "grad_out") in phases and ("0", "grad_out") in phases
    assert one(found, "1", "grad_out", "out").l1 == 8


def test_training_a_real_model_with_gradients(tmp_path: Path) -> None:
    model = llama(2)
    with trace(model, tmp_path / "run.jsonl", gradients=True):
        for _ in range(2):
            model(tokens(), labels=tokens()).loss.backward()
    found = read(tmp_path / "run.jsonl")
    assert {r.call for r in found.records if r.phase == "grad_out"} == {0, 1}
    assert one_of(found, "model.layers.0.mlp.act_fn", "grad_out") == 2
    assert one_of(found, "", "grad_out") >= 2
    assert found.ended and not found.notes


def one_of(found: Any, module: str, phase: str) -> int:
    return sum((r.module, r.phase) == (module, phase) for r in found.records)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_runs_again_is_not_recorded_again(
    tmp_path: Path, reentrant: bool
) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant)

    model = Checkpointed()
    with trace(model, tmp_path / "run.jsonl"):
        for _ in range(2):
            model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    found = read(tmp_path / "run.jsonl")
    assert places(found)[:8] == places(found)[8:] and len(found.records) == 16
    assert [r.call for r in found.records] == [0] * 8 + [1] * 8
    assert model.block.first.weight.grad is not None


def test_parameters_are_recorded_when_they_change(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad(), trace(model, tmp_path / "run.jsonl", parameters=True):
        model(torch.ones(1, 4))
        model(torch.ones(1, 4))
        model.bias.add_(1)
        model(torch.ones(1, 4))
    found = [r for r in read(tmp_path / "run.jsonl").records if r.phase == "param"]
    assert [(r.tensor, r.call) for r in found] == [("weight", 0), ("bias", 0), ("bias", 2)]
    assert found[2].mean == pytest.approx(found[1].mean + 1, rel=1e-5)


def test_whole_tensors(tmp_path: Path) -> None:
    safe_open = pytest.importorskip("safetensors").safe_open
    model = llama(1)
    name = "model.layers.0.mlp"
    found = recorded(model, tmp_path / "run.jsonl", tokens(), tensors=[name, "lm_head"])
    kept = [r for r in found.records if r.file is not None]
    assert [(r.module, r.phase) for r in kept] == [
        (name, "in"),
        (name, "out"),
        ("lm_head", "in"),
        ("lm_head", "out"),
    ]
    for record in kept:
        with safe_open(found.file_of(record), "pt") as file:
            whole = file.get_tensor("tensor")
            assert file.metadata() == {"dtype": "float32"}
        assert tuple(whole.shape) == record.shape
        assert whole.double().norm().item() == pytest.approx(record.l2, rel=1e-6)
    with pytest.raises(TraceError, match=r"run\.jsonl"):
        trace(model, tmp_path / "run.jsonl", tensors=[name])
    again = recorded(model, tmp_path / "run.jsonl", tokens(), tensors=["lm_head"])
    assert len(list((tmp_path / "run.tensors").iterdir())) == 2
    assert sum(r.file is not None for r in again.records) == 2


def test_identical_whole_tensors_are_one_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    model = nn.Sequential(nn.Identity(), nn.Identity())
    x = torch.tensor([1 + 2j, 3j])
    found = recorded(model, tmp_path / "run.jsonl", x, tensors="", layers=["0"])
    assert {r.file for r in found.records} == {"run.tensors/0.safetensors"}
    whole = safetensors.torch.load_file(found.file_of(found.records[-1]))["tensor"]
    assert torch.equal(torch.view_as_complex(whole), x)


def test_whole_tensors_need_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="pip install safetensors"):
        trace(Block(), tmp_path / "run.jsonl", tensors=["first"])
    assert list(tmp_path.iterdir()) == []


def test_waiting_tensors_are_bounded(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = nn.Identity()
    with trace(model, tmp_path / "run.jsonl", tensors="") as run:
        run.recorder.folder._limit = 3 * 4000
        for value in range(40):
            model(torch.full((1000,), float(value)))
            assert run.recorder.folder._waiting <= 3 * 4000
    assert len(list((tmp_path / "run.tensors").iterdir())) == 40


def test_any_program(tmp_path: Path) -> None:
    encoder, decoder, loss = Block(), nn.Sequential(nn.Linear(8, 8)), nn.MSELoss()
    before = nn.Module.__call__
    with trace_any(tmp_path / "run.jsonl") as traced:
        for _ in range(2):
            loss(decoder(encoder(X, scale=torch.tensor(2.0))), X)
        with pytest.raises(TraceError, match="inside another one"), trace_any("other.jsonl"):
            pass
    assert nn.Module.__call__ is before and not encoder._forward_hooks
    assert [path.name for path in traced.paths] == ["run.jsonl", "run.Sequential.jsonl"]
    first, second = map(read, traced.paths)
    assert places(first)[:2] == [("", "in", "args[0]"), ("", "in", "kwargs.scale")]
    assert [r.call for r in second.records if r.module == ""] == [0, 0, 1, 1]
    assert first.header.weights and second.header.modules == {"": "Sequential", "0": "Linear"}


def test_any_program_gives_the_trace_that_trace_gives(tmp_path: Path) -> None:
    model = llama(1)
    expected = recorded(model, tmp_path / "a.jsonl", tokens())
    with torch.no_grad(), trace_any(tmp_path / "b.jsonl"):
        model(tokens())
    assert read(tmp_path / "b.jsonl").records == expected.records


@pytest.mark.parametrize("way", ["compile", "in place"])
def test_any_program_that_compiles(tmp_path: Path, way: str) -> None:
    torch._dynamo.reset()
    model = Block()
    expected = recorded(model, tmp_path / "a.jsonl", X)
    with torch.no_grad(), trace_any(tmp_path / "b.jsonl"):
        if way == "compile":
            torch.compile(model, fullgraph=True, backend="aot_eager")(X)
        else:
            model.compile(fullgraph=True, backend="aot_eager")
            model(X)
    assert read(tmp_path / "b.jsonl").records == expected.records
    torch._dynamo.reset()


def test_an_error_of_the_program_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), trace_any(tmp_path / "run.jsonl"):
        Block()(X)
        raise ZeroDivisionError
    assert read(tmp_path / "run.jsonl").ended
    (tmp_path / "full.jsonl").write_text("precious")
    with pytest.raises(TraceError, match="holds 8 bytes"), trace_any(tmp_path / "full.jsonl"):
        Block()(X)


def test_a_process_that_traces_prints_nothing(tmp_path: Path) -> None:
    code = (
        "import torch, sys; from polyattn.hooks import trace\n"
        "m = torch.nn.Linear(2, 2)\n"
        "with trace(m, sys.argv[1]): m(torch.ones(1, 2))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run.jsonl")],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout == done.stderr == ""
    assert "end" in json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])


def test_a_flush_from_another_thread_in_the_middle_of_a_call(tmp_path: Path) -> None:
    class Many(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return tensors[0]

    model = Many()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with trace(model, tmp_path / "run.jsonl") as run:
            calling = threading.Thread(
                target=lambda: [model(*map(torch.full, [(3,)] * 40, range(40))) for _ in range(100)]
            )
            calling.start()
            while calling.is_alive():
                run.flush()
            calling.join()
    finally:
        sys.setswitchinterval(before)
    found = read(tmp_path / "run.jsonl")
    assert found.ended and not found.notes and len(found.records) == 100 * 41
    assert {record.max for record in found.records if record.tensor == "args[7]"} == {7}
