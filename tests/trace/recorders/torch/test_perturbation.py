"""Traces under perturbed weights: which are moved, by how much, and that all are put back."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.errors import TraceError
from polyattn.hooks import trace, trace_any
from polyattn.trace import read
from tests.trace.recorders.torch.traced_models import llama, tokens

X = torch.ones(2, 8)

pytestmark = pytest.mark.filterwarnings("ignore:nothing was recorded")


def bits(model: nn.Module) -> list[torch.Tensor]:
    """All weights as bytes."""
    return [p.detach().clone().contiguous().view(torch.uint8) for p in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("way", ["trace", "trace_any"])
def test_weights_move_by_a_rounding_and_come_back(tmp_path: Path, way: str) -> None:
    model = llama(1)
    before, old = bits(model), [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    path = tmp_path / "run.jsonl"
    with (
        torch.no_grad(),
        trace(model, path, perturb=3) if way == "trace" else trace_any(path, perturb=3),
    ):
        model(tokens())
        for one, was in zip(model.parameters(), old, strict=True):
            apart = ((one - was) / was.abs().clamp(min=1e-30)).abs()
            assert apart.max() <= 1.5 * 2**-23
            assert was.numel() < 100 or (one != was).float().mean() > 0.2
        header = read(path).header if way == "trace" else None
    assert same(bits(model), before)
    assert torch.equal(torch.get_rng_state(), state)
    found = read(path)
    assert found.header.selection["perturb"] == 3
    assert header is None or header.weights
    with torch.no_grad(), trace(model, tmp_path / "plain.jsonl"):
        model(tokens())
    plain = read(tmp_path / "plain.jsonl")
    assert "perturb" not in plain.header.selection
    assert all(
        plain.header.weights[n]["sum"] != w["sum"]
        for n, w in found.header.weights.items()
        if "norm" not in n
    )


def test_seeds_differ_and_repeat(tmp_path: Path) -> None:
    model, seen = llama(1), []
    for index, seed in enumerate((1, 1, 2)):
        with trace(model, tmp_path / f"{index}.jsonl", perturb=seed):
            seen.append(bits(model))
    assert same(seen[0], seen[1]) and not same(seen[0], seen[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_each_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, dtype=dtype)
    before, old = bits(model), model.weight.detach().clone()
    with trace(model, tmp_path / "run.jsonl", perturb=1, weights=False):
        apart = (model.weight - old).abs() / old.abs()
        assert 0 < apart.max() <= 1.5 * torch.finfo(dtype).eps
        assert (apart > 0).float().mean() > 0.2
    assert same(bits(model), before)


def test_what_is_no_number_or_the_largest_stays(tmp_path: Path) -> None:
    model = nn.Linear(4, 1, bias=False)
    most = torch.finfo(torch.float32).max
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[float("nan"), float("inf"), 0.0, most]]))
    before = bits(model)
    for seed in range(4):
        with trace(model, tmp_path / f"{seed}.jsonl", perturb=seed):
            weight = model.weight[0]
            assert weight[0].isnan() and weight[1].isinf() and weight[2] == 0
            assert weight[3].isfinite()
    assert same(bits(model), before)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.second.weight = self.first.weight
        self.third.weight.data = self.first.weight.data  # another parameter, the same memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


def test_tied_weights_are_moved_once(tmp_path: Path) -> None:
    model = Tied()
    with torch.no_grad():
        model.first.weight.copy_(torch.full((8, 8), 1.999))
    before, old = bits(model), model.first.weight.detach().clone()
    with trace_any(tmp_path / "run.jsonl", perturb=1):
        outer = nn.Sequential(nn.Linear(8, 8), model.second)  # a second model with a part of it
        model(X)
        moved = model.first.weight.detach().clone()
        outer(X)
        assert torch.equal(model.first.weight, moved)
    assert ((moved - old).abs() / old).max() <= 1.5 * 2**-23
    assert same(bits(model), before)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(8, 8)
        self.codes = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
        self.eighth = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
        self.nowhere = nn.Parameter(torch.ones(4, device="meta"))
        self.sparse = nn.Parameter(torch.eye(4).to_sparse())
        self.one = nn.Parameter(torch.tensor([2.5]).expand(4), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(6, 8).T)
        self.lazy = nn.LazyLinear(3)
        self.scalar = nn.Parameter(torch.tensor(1.7))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x)


def test_what_cannot_be_perturbed_is_left_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Odd()
    before = [p.detach().clone() for p in (model.plain.weight, model.turned, model.scalar)]
    with trace(model, tmp_path / "run.jsonl", perturb=1, weights=False):
        after = [p.detach().clone() for p in (model.plain.weight, model.turned, model.scalar)]
        assert not any(torch.equal(a, b) for a, b in zip(before[:2], after[:2], strict=True))
        model(X)
    said = caplog.text
    assert "7 weights of a Odd cannot be perturbed and stay as they are" in said
    assert "codes (int8), eighth (float8_e4m3fn), nowhere (on the meta device)" in said
    after = [model.plain.weight, model.turned, model.scalar]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_the_program_changed_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    last = bits(model[1])
    with trace_any(tmp_path / "run.jsonl", perturb=1):
        model(X)
        with torch.no_grad():
            model[0].weight.add_(1)
            trained = model[0].weight.clone()
    assert torch.equal(model[0].weight, trained) and same(bits(model[1]), last)
    assert "1 weights were changed while they were perturbed" in caplog.text
    assert "the first is 0.weight" in caplog.text


def test_weights_come_back_whatever_happens(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    before = bits(model)
    with pytest.raises(ZeroDivisionError), trace(model, tmp_path / "a.jsonl", perturb=1):
        raise ZeroDivisionError
    assert same(bits(model), before)
    with pytest.raises(ZeroDivisionError), trace_any(tmp_path / "b.jsonl", perturb=1):
        model(X)
        raise ZeroDivisionError
    assert same(bits(model), before)
    with pytest.raises(TraceError, match="matches none of the 1"):
        trace(model, tmp_path / "c.jsonl", tensors=["x"], layers="", perturb=1)
    assert same(bits(model), before)
    with trace(model, tmp_path / "d.jsonl"), pytest.raises(TraceError, match="already"):
        trace(model, tmp_path / "e.jsonl", perturb=1)
    assert same(bits(model), before)


def test_a_graph_that_was_built_before_still_goes_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    loss = model(X).sum()
    with trace(model, tmp_path / "run.jsonl", perturb=1):
        model(X).sum().backward()
    loss.backward()
    assert model[0].weight.grad is not None


def test_weights_of_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = nn.Linear(8, 8)
    before = bits(model)
    with torch.inference_mode(), trace(model, tmp_path / "run.jsonl", perturb=1):
        model(X)
        assert not same(bits(model), before)
    assert same(bits(model), before)


@pytest.mark.parametrize("seed", [True, -1, "1", 2.0, 2**40])
def test_seeds_that_are_none(tmp_path: Path, seed: object) -> None:
    for call in (trace, lambda _, *a, **k: trace_any(*a, **k).__enter__()):
        with pytest.raises(TraceError, match="expected a seed"):
            call(nn.Linear(2, 2), tmp_path / "run.jsonl", perturb=seed)
    assert not list(tmp_path.iterdir())


def test_before_is_called_before_the_trace_of_each_model_begins(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []

    def double(model: nn.Module) -> None:
        seen.append((type(model).__name__, bool(model._forward_hooks)))
        with torch.no_grad():
            next(model.parameters()).fill_(2.0)

    first, second = nn.Linear(8, 8, bias=False), nn.Sequential(nn.Linear(8, 8))
    with trace_any(tmp_path / "run.jsonl", before=double, layers="^0?$") as traced:
        nn.ReLU()(second(first(X)))
        first(X)
    assert seen == [("Linear", False), ("Sequential", False)]
    weights = read(traced.paths[0]).header.weights
    assert weights["weight"]["sum"] == 128.0
    assert [r.mean for r in read(traced.paths[0]).records if r.phase == "out"] == [16.0, 16.0]


def test_an_error_of_before_is_the_programs(tmp_path: Path) -> None:
    def fails(model: nn.Module) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError), trace_any(tmp_path / "run.jsonl", before=fails):
        nn.Linear(8, 8)(X)
    assert not list(tmp_path.iterdir())
