"""Compiled models give the trace of eager ones, without a graph break."""

import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch._dynamo.testing import CompileCounter

from polyattn.hooks import trace, trace_step
from polyattn.trace import Trace, read
from tests.trace.recorders.torch.traced_models import Block, llama, places, recorded, tokens

BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's compiler
        yield
    torch._dynamo.reset()


def agree(found: Trace, expected: Trace, tolerance: float) -> None:
    def frame(trace: Trace) -> list[Any]:
        return [(r.seq, r.key, r.cls, r.shape, r.dtype, r.n, r.same) for r in trace.records]

    assert frame(found) == frame(expected)
    for a, b in zip(found.records, expected.records, strict=True):
        assert a.extra == b.extra  # of what is no tensor
        if a.sketch is None:
            continue
        assert a.l2 == pytest.approx(b.l2, rel=tolerance), a
        assert a.samples == pytest.approx(b.samples, rel=tolerance, abs=tolerance), a
    assert found.ended


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("attached", ["before", "after"])
def test_a_whole_model(tmp_path: Path, backend: str, attached: str) -> None:
    model = llama(2)
    expected = recorded(model, tmp_path / "eager.jsonl", tokens())
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        if attached == "after":
            compiled(tokens())
        with trace(compiled if backend == "eager" else model, tmp_path / "compiled.jsonl"):
            compiled(tokens())
        clean = compiled(tokens()).logits
        assert torch.allclose(clean, model(tokens()).logits, atol=1e-5)
    agree(read(tmp_path / "compiled.jsonl"), expected, 0 if backend != "inductor" else 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_calls_and_shapes_are_those_of_the_run(tmp_path: Path, backend: str) -> None:
    model = Block()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    with torch.no_grad(), trace(model, tmp_path / "run.jsonl", steps="1-3"):
        for step in range(5):
            with trace_step(step):
                compiled(torch.ones(step + 2, 8), scale=torch.tensor(2.0))
    roots = [r for r in read(tmp_path / "run.jsonl").records if r.module == ""]
    assert [(r.step, r.call, r.phase, r.shape) for r in roots if r.tensor != "kwargs.scale"] == [
        (step, step, phase, (step + 2, 8)) for step in (1, 2, 3) for phase in ("in", "out")
    ]
    assert sum(r.tensor == "kwargs.scale" for r in roots) == 3


class Several(nn.Module):
    """Returns what is no tensor as well, the length of its input among it."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"y": x + 1, "length": x.shape[0], "name": "several", "none": None}


class UsesThem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.several = Several()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.several(x)
        return found["y"] * found["length"]


def test_what_is_no_tensor_is_noted(tmp_path: Path) -> None:
    model = UsesThem()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    with torch.no_grad(), trace(model, tmp_path / "run.jsonl"):
        for size in (3, 4):
            assert compiled(torch.ones(size, 8)).max() == 2 * size
    found = [r for r in read(tmp_path / "run.jsonl").records if r.module == "several"]
    kinds = {r.tensor: r.extra["note"].partition(" that")[0] for r in found if r.extra}
    assert kinds == {"out.length": "a number", "out.name": "a str"}
    assert [r.shape for r in found if r.tensor == "out.y"] == [(3, 8), (4, 8)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_changed_in_place_are_recorded_as_they_came(tmp_path: Path, backend: str) -> None:
    class Doubles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    model = nn.Sequential(Doubles(), Doubles())
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad(), trace(model, tmp_path / "run.jsonl"):
        for _ in range(2):
            compiled(torch.ones(4))
    found = read(tmp_path / "run.jsonl").records
    assert [r.mean for r in found] == [1, 1, 2, 2, 4, 4] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_records_the_forward_once(tmp_path: Path, backend: str) -> None:
    model = Block()
    expected = recorded(model, tmp_path / "eager.jsonl", torch.ones(2, 8))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with trace(model, tmp_path / "run.jsonl"):
        compiled(torch.ones(2, 8)).sum().backward()
    agree(read(tmp_path / "run.jsonl"), expected, 1e-5)
    assert model.first.weight.grad is not None


def test_blocks_compiled_one_by_one_share_their_code(tmp_path: Path) -> None:
    count = CompileCounter()
    model = nn.Sequential(*[Block() for _ in range(4)])
    expected = recorded(model, tmp_path / "eager.jsonl", torch.ones(2, 8))
    for block in model:
        block.compile(fullgraph=True, backend=count)
    with torch.no_grad(), trace(model, tmp_path / "run.jsonl"):
        model(torch.ones(2, 8))
    agree(read(tmp_path / "run.jsonl"), expected, 0)
    assert count.frame_count == 1


def test_a_graph_break_is_no_hole(tmp_path: Path) -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            torch._dynamo.graph_break()
            return y + 1

    model = nn.Sequential(Breaks(), Breaks())
    expected = recorded(model, tmp_path / "eager.jsonl", torch.ones(2, 8))
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad(), trace(model, tmp_path / "run.jsonl"):
        compiled(torch.ones(2, 8))
    assert places(read(tmp_path / "run.jsonl")) == places(expected)


def test_a_failing_compiled_call_costs_no_later_record(tmp_path: Path) -> None:
    @torch.library.custom_op("polyattn_tests::fails", mutates_args=())
    def fails(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            raise RuntimeError("too much")
        return x.clone()

    fails.register_fake(lambda x: torch.empty_like(x))

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fails(x)

    model = nn.Sequential(nn.Linear(4, 4), Fails())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), trace(model, tmp_path / "run.jsonl") as run:
        nn.init.ones_(model[0].weight)
        with pytest.raises(RuntimeError, match="too much"):
            compiled(torch.ones(1, 4))
        for _ in range(3):
            compiled(-torch.ones(1, 4) * 9)
        assert not run.recorder.lane().stack
    roots = [r for r in read(tmp_path / "run.jsonl").records if r.module == ""]
    assert [(r.phase, r.call) for r in roots] == [
        ("in", 0),
        ("in", 1),
        ("out", 1),
        ("in", 2),
        ("out", 2),
        ("in", 3),
        ("out", 3),
    ]


def test_compiled_code_outlives_its_trace(tmp_path: Path) -> None:
    model = Block()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for name in ("a", "b"):
        with torch.no_grad(), trace(model, tmp_path / f"{name}.jsonl"):
            compiled(torch.ones(2, 8))
        compiled(torch.ones(2, 8))
        assert len(read(tmp_path / f"{name}.jsonl").records) == 6
