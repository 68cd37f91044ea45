"""What a trace records of each call: which tensors, in which order, with which numbers."""

import collections
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trace.recorders.torch.traced_models import Block, llama, one, places, recorded, tokens

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.hooks import trace, trace_step
from polyattn.trace import read, sketch
from polyattn.trace.fingerprints import fingerprint
from polyattn.trace.statistics import statistics
from polyattn.trace.statistics.schema import COUNTS, DEFAULT_STATISTICS, MOMENTS


def test_inputs_and_outputs_of_every_module_in_the_order_of_events(tmp_path: Path) -> None:
    found = recorded(Block(), tmp_path / "run.jsonl", torch.ones(2, 8))
    assert places(found) == [
        ("", "in", "args[0]"),
        ("first", "in", "args[0]"),
        ("first", "out", "out"),
        ("second", "in", "args[0]"),
        ("second", "out", "out"),
        ("", "out", "out"),
    ]
    assert [r.same for r in found.records] == [None, 0, None, None, None, 4]
    assert [r.cls for r in found.records][:2] == ["Block", "Linear"]
    assert found.ended and not found.notes


def test_the_numbers_are_those_of_the_reference(tmp_path: Path) -> None:
    model, x = Block(), torch.randn(3, 8)
    found = recorded(model, tmp_path / "run.jsonl", x)
    with torch.no_grad():
        expected = statistics(model.first(x).numpy())
    record = one(found, "first", "out")
    for name in (set(COUNTS) | set(MOMENTS)) & set(DEFAULT_STATISTICS):
        assert getattr(record, name) == pytest.approx(expected[name], rel=1e-6), name
    assert record.samples == pytest.approx(expected["samples"], rel=1e-8)
    assert sketch.distance(record.sketch, expected["sketch"]) < 1e-6


def test_a_real_decoder_is_recorded_wholly_and_changed_by_nothing(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        clean = model(tokens(), use_cache=False).logits
        with trace(model, tmp_path / "run.jsonl"):
            traced = model(tokens(), use_cache=False).logits
    assert torch.equal(clean, traced)
    found = read(tmp_path / "run.jsonl")
    called = {name for name, one in model.named_modules() if not isinstance(one, nn.ModuleList)}
    assert {r.module for r in found.records} == called
    assert one(found, "", "out").tensor == "out.logits"
    assert one(found, "model", "out").tensor == "out.last_hidden_state"
    attention = "model.layers.1.self_attn"
    assert one(found, attention, "in", "kwargs.position_embeddings[1]").shape == (1, 16, 16)
    assert one(found, attention, "out", "out[1]").shape == (1, 4, 16, 16)
    lines = (tmp_path / "run.jsonl").read_bytes().splitlines()[1:]
    assert max(map(len, lines)) < 1000
    # most inputs are what some module returned: their numbers are not computed again
    assert sum(r.same is not None for r in found.records) > len(found.records) / 3


def test_a_real_denoiser_is_recorded(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
        block_out_channels=(8, 16),
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()
    x, states = torch.randn(1, 4, 8, 8), torch.randn(1, 3, 8)
    with torch.no_grad(), trace(model, tmp_path / "run.jsonl"):
        for step in range(2):
            for _ in ("with prompt", "without"):  # classifier-free guidance: two calls a step
                with trace_step(step):
                    x = model(x, torch.tensor(step), encoder_hidden_states=states).sample
    found = read(tmp_path / "run.jsonl")
    ends = [r for r in found.records if r.module == "" and r.phase == "out"]
    assert [(r.tensor, r.step, r.call) for r in ends] == [
        ("out.sample", 0, 0),
        ("out.sample", 0, 1),
        ("out.sample", 1, 2),
        ("out.sample", 1, 3),
    ]
    assert ends[-1].mean == pytest.approx(x.double().mean().item(), rel=1e-6)


def test_nested_values_have_paths(tmp_path: Path) -> None:
    Pair = collections.namedtuple("Pair", "left right")

    @dataclasses.dataclass
    class Result:
        hidden: Any
        maybe: Any = None

    class Nested(nn.Module):
        def forward(self, pairs: Any, mask: Any = None, name: str = "") -> Any:
            t = pairs[0].left
            return Result({"a b": t + 1, "states": (t + 2, [t + 3])})

    t = torch.ones(2)
    path = tmp_path / "run.jsonl"
    with trace(nn.Sequential(collections.OrderedDict(n=Nested())), path, layers=["n"]) as run:
        run.model.n([Pair(t, t * 2)], mask={"x": t * 3}, name="text")
    assert [p[1:] for p in places(read(path))] == [
        ("in", "args[0][0].left"),
        ("in", "args[0][0].right"),
        ("in", "kwargs.mask.x"),
        ("out", "out.hidden['a b']"),
        ("out", "out.hidden.states[0]"),
        ("out", "out.hidden.states[1][0]"),
    ]


def test_an_input_changed_in_place_is_recorded_as_it_came(tmp_path: Path) -> None:
    class Doubles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    model = nn.Sequential(Doubles(), Doubles())
    for mode in (torch.no_grad, torch.inference_mode):
        path = tmp_path / f"{mode.__name__}.jsonl"
        with mode(), trace(model, path):
            model(torch.ones(4))
        found = read(path).records
        came = [r for r in found if r.phase == "in" or r.tensor == "out"]
        assert [r.mean for r in came] == [1, 1, 2, 2, 4, 4]
        assert [r.same is None for r in came] == [True, False, True, False, True, False]
        left = [(r.module, r.mean) for r in found if r not in came]
        # inference tensors have no version that tells
        known = mode is torch.no_grad
        assert left == ([("0", 2), ("1", 4), ("", 4)] if known else [])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_every_mode_gives_the_same_trace(tmp_path: Path, mode: Any) -> None:
    model = llama(1)
    expected = recorded(model, tmp_path / "a.jsonl", tokens()).records
    with mode(), trace(model, tmp_path / "b.jsonl"):
        model(tokens())
    assert read(tmp_path / "b.jsonl").records == expected


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float64", "complex64", "int64", "bool", "float8_e4m3fn"]
)
def test_all_dtypes(tmp_path: Path, dtype: str) -> None:
    x = torch.tensor([[1, 0], [3, 1]]).to(getattr(torch, dtype))
    record = recorded(nn.Identity(), tmp_path / "run.jsonl", x).records[0]
    assert (record.dtype, record.shape) == (dtype, (2, 2))
    assert record.n == (8 if dtype == "complex64" else 4)
    assert record.l1 == (3 if dtype == "bool" else 5)


def test_not_finite_and_empty_tensors(tmp_path: Path) -> None:
    bad = torch.tensor([float("nan"), float("inf"), -float("inf"), 2.0])
    model = nn.Identity()
    with trace(model, tmp_path / "run.jsonl"):
        for x in (bad, torch.full((3,), float("nan")), torch.empty(0, 4)):
            model(x)
    some, none, empty = (r for r in read(tmp_path / "run.jsonl").records if r.phase == "in")
    assert (some.nan, some.pinf, some.ninf, some.mean, some.samples[0]) == (1, 1, 1, 2.0, None)
    assert (none.nan, none.mean, none.l2) == (3, None, None)
    assert (empty.n, empty.shape, empty.samples) == (0, (0, 4), ())


def test_what_holds_no_plain_numbers_is_noted(tmp_path: Path) -> None:
    model = nn.Identity()
    with trace(model, tmp_path / "run.jsonl"):
        model(torch.eye(3).to_sparse())
        model(torch.ones(2, device="meta"))
        torch.func.vmap(model)(torch.ones(2, 2))
    first, _, meta, _ = read(tmp_path / "run.jsonl").records
    assert "to_dense" in first.extra["note"] and first.shape == (3, 3) and first.mean is None
    assert "meta" in meta.extra["note"]


def test_a_shared_module_counts_its_calls(tmp_path: Path) -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    found = recorded(model, tmp_path / "run.jsonl", torch.ones(1, 4))
    assert [r.call for r in found.records if (r.module, r.phase) == ("0", "out")] == [0, 1]
    assert found.header.modules == {"": "Sequential", "0": "Linear", "1": "ReLU"}


def test_a_module_that_calls_itself(tmp_path: Path) -> None:
    class Down(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return x + 1 if depth == 0 else self(x * 2, depth - 1)

    found = recorded(Down(), tmp_path / "run.jsonl", torch.ones(1))
    assert [(r.phase, r.call) for r in found.records] == [
        ("in", 0),
        ("in", 1),
        ("in", 2),
        ("out", 2),
        ("out", 1),
        ("out", 0),
    ]


def test_the_header_says_what_ran(tmp_path: Path) -> None:
    model = llama(1, tie_word_embeddings=True)
    torch.manual_seed(17)
    header = recorded(model, tmp_path / "run.jsonl", tokens(), layers="mlp").header
    assert (header.framework, header.seed, header.world) == ("torch", 17, 1)
    assert header.versions["torch"] == torch.__version__ and "transformers" in header.versions
    assert header.dtypes == {"float32": len(list(model.parameters()))}
    assert header.modules["model.layers.0.mlp"] == "LlamaMLP"
    assert header.selection["layers"] == "mlp" and header.selection["modules"] == 5
    assert header.flags["polyattn.flags"]["framework"] == "torch"
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert sorted(header.weights) == sorted(names)


@pytest.mark.parametrize("shape", [(), (5,), (24, 36), (3, 8, 2, 2), (0, 4), (700, 513)])
def test_weights_have_the_fingerprints_of_the_reference(shape: tuple[int, ...]) -> None:
    from polyattn.trace.recorders.torch.weights import weight_fingerprint

    for values in (torch.randn(shape), torch.randn(shape, dtype=torch.complex64)):
        if values.numel() > 3:
            values.view(-1)[2] = float("nan")
        found, expected = weight_fingerprint(values), fingerprint(values.numpy())
        assert found.keys() == expected.keys()
        assert (found["shape"], found["dtype"], found["n"]) == tuple(
            expected[name] for name in ("shape", "dtype", "n")
        )
        assert found["slices"].keys() == expected["slices"].keys()
        for name in ("sum", "sum2", "sum3", "min", "max"):
            assert found[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-9)
        assert sketch.distance(found["sketch"], expected["sketch"]) < 1e-6
    half = weight_fingerprint(torch.ones(4, 4, dtype=torch.bfloat16).T)
    assert half["sum3"] == 16 and half["dtype"] == "bfloat16"
    assert np.isfinite(half["max"])
