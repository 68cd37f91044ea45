"""A trace never ends the model that it watches, whatever passes through it."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

from polyattn.hooks import attach_activation_trace, detach_activation_trace, trace
from polyattn.trace import Trace, read
from polyattn.trace.recorders.torch import tensor_statistics as kernels
from polyattn.trace.statistics import statistics
from tests.trace.recorders.torch.traced_models import one, recorded

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture(params=["native", "python"], autouse=True)
def lines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What records: the extension, or Python."""
    if request.param == "python":
        monkeypatch.setattr(kernels, "native_module", lambda: None)
    return request.param


def nested(parts: list[Tensor], layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor(parts, layout=layout)


def encoder() -> tuple[nn.Module, Tensor]:
    """A model of torch's that makes nested tensors of what is padded."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    return nn.TransformerEncoder(layer, 2).eval(), padding


def test_torchs_encoder_with_padding(tmp_path: Path) -> None:
    model, padding = encoder()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        with trace(model, tmp_path / "run.jsonl"):
            assert model(x, src_key_padding_mask=padding).equal(expected)
    found = read(tmp_path / "run.jsonl")
    inside = one(found, "layers.0", "in", "args[0]")
    assert inside.shape == (8, 8) and inside.sketch is not None  # rows of both, without padding
    assert inside.extra["nested"] == {"layout": "strided", "count": 2, "shapes": [[5, 8], [3, 8]]}
    kept = x[~padding]
    assert inside.samples == tuple(pytest.approx(v) for v in statistics(kept.numpy())["samples"])


def test_torchs_encoder_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_TRACE_ACTIVATIONS", "1")
    monkeypatch.setenv("POLYATTN_TRACE_OUTPUT", str(tmp_path / "run.jsonl"))
    model, padding = encoder()
    run = attach_activation_trace(model)
    with torch.no_grad():
        model(torch.ones(2, 5, 8), src_key_padding_mask=padding)
    detach_activation_trace(run)
    assert read(tmp_path / "run.jsonl").ended


LAYOUTS = pytest.mark.parametrize(
    "layout", [torch.strided, torch.jagged], ids=["strided", "jagged"]
)


@LAYOUTS
def test_the_statistics_of_a_nested_tensor_are_of_its_values(
    tmp_path: Path, layout: torch.layout
) -> None:
    parts = [torch.randn(2, 3, 4), torch.randn(1, 3, 4)]
    found = recorded(nn.Identity(), tmp_path / "a.jsonl", nested(parts, layout)).records[0]
    packed = recorded(nn.Identity(), tmp_path / "b.jsonl", torch.cat(parts)).records[0]
    assert (found.shape, found.dtype) == ((3, 3, 4), "float32")
    assert found.identity == packed.identity and found.samples == packed.samples
    assert found.extra["nested"]["layout"] == str(layout).removeprefix("torch.")
    assert found.extra["nested"]["shapes"] == [[2, 3, 4], [1, 3, 4]]


@LAYOUTS
def test_a_nested_tensor_that_was_transposed(tmp_path: Path, layout: torch.layout) -> None:
    parts = [torch.randn(2, 3, 4), torch.randn(1, 3, 4)]
    t = nested(parts, layout).transpose(1, 2)
    found = recorded(nn.Identity(), tmp_path / "a.jsonl", t).records[0]
    flat = torch.cat([part.transpose(0, 1).reshape(-1) for part in parts])
    packed = recorded(nn.Identity(), tmp_path / "b.jsonl", flat).records[0]
    assert found.identity == packed.identity and found.shape == (36,)
    assert found.extra["nested"]["shapes"] == [[3, 2, 4], [3, 1, 4]]


def test_a_jagged_tensor_with_holes(tmp_path: Path) -> None:
    values = torch.arange(8.0)[:, None]
    t = torch.nested.nested_tensor_from_jagged(
        values, offsets=torch.tensor([0, 4, 8]), lengths=torch.tensor([2, 3])
    )
    found = recorded(nn.Identity(), tmp_path / "a.jsonl", t).records[0]
    assert found.shape == (5, 1) and found.max == 6 and found.l1 == 0 + 1 + 4 + 5 + 6


def test_many_components_make_no_long_line(tmp_path: Path) -> None:
    t = nested([torch.ones(1 + i % 7, 2) for i in range(1000)], torch.jagged)
    recorded(nn.Identity(), tmp_path / "a.jsonl", t)
    assert max(map(len, (tmp_path / "a.jsonl").read_text().splitlines()[1:])) < 1000
    found = read(tmp_path / "a.jsonl").records[0]
    assert found.extra["nested"]["count"] == 1000 and len(found.extra["nested"]["shapes"]) == 8


@LAYOUTS
@pytest.mark.parametrize("options", [{"gradients": True}, {"stats": ["max", ("f", Tensor.numel)]}])
def test_nested_tensors_with_every_option(
    tmp_path: Path, layout: torch.layout, options: dict[str, Any]
) -> None:
    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(3, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            t = torch.nested.as_nested_tensor([a, b], layout=layout)
            return torch.cat(self.up(t).unbind())

    model = Packs()
    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(1, 3, requires_grad=True)
    expected = torch.autograd.grad(model(a, b).square().sum(), (a, b))
    with trace(model, tmp_path / "run.jsonl", parameters=True, **options):
        out = model(a, b)
        found = torch.autograd.grad(out.square().sum(), (a, b))
    assert all(x.equal(y) for x, y in zip(found, expected, strict=True))
    run = read(tmp_path / "run.jsonl")
    assert run.ended and one(run, "up", "out").shape == (3, 3)
    if options.get("gradients"):
        assert one(run, "up", "grad_out").shape == (3, 3)
    else:
        assert one(run, "up", "out").extra["f"] == 9


def test_whole_nested_tensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    parts = [torch.randn(2, 3), torch.randn(1, 3)]
    found = recorded(nn.Identity(), tmp_path / "a.jsonl", nested(parts, torch.jagged), tensors="")
    file = tmp_path / found.records[0].file
    assert safetensors.load_file(file)["tensor"].equal(torch.cat(parts))


def test_what_cannot_be_kept_whole_takes_no_room_and_ends_no_trace(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = nn.Identity()
    with trace(model, tmp_path / "run.jsonl", tensors="") as run:
        for t in (torch.eye(3).to_sparse(), _quantised(X), torch.ones(3, device="meta"), X):
            model(t)
        run.flush()
        assert run.recorder.folder is not None and run.recorder.folder._waiting == 0
    found = read(tmp_path / "run.jsonl")
    assert found.ended and [bool(r.file) for r in found.records] == [False] * 6 + [True] * 2


def _quantised(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)


def _freed(x: Tensor) -> Tensor:
    y = x.clone()
    y.untyped_storage().resize_(0)
    return y


def _fake(x: Tensor) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2, 3)


class Refuses(Tensor):
    """A tensor that lets nobody do anything with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("no operation on this")


class Wraps(Tensor):
    """A tensor without values, which takes no operation but one that makes it a weight."""

    @staticmethod
    def __new__(cls, x: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0])
        raise RuntimeError("no operation on this")


class NoItems(dict[str, Any]):
    """A mapping that cannot be looked into."""

    def items(self) -> Any:
        raise RuntimeError("no items")


class NoName:
    """A key that has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


@dataclasses.dataclass
class NoField:
    """A dataclass whose field cannot be read."""

    a: Any

    def __getattribute__(self, name: str) -> Any:
        if name == "a":
            raise RuntimeError("no field")
        return super().__getattribute__(name)


NOTED: dict[str, Callable[[Tensor], Any]] = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "quantised": _quantised,
    "quantised by channel": lambda x: torch.quantize_per_channel(
        x, torch.ones(2), torch.zeros(2), 0, torch.qint8
    ),
    "meta": lambda x: x.to("meta"),
    "freed": _freed,
    "functional": torch._to_functional_tensor,
    "wrapper": Wraps,
    "refuses": lambda x: x.as_subclass(Refuses),
    "4 bits": lambda x: torch.empty(3, dtype=torch.uint4),
    "a mapping": lambda x: NoItems(a=x),
    "a key": lambda x: {NoName(): x},
    "a dataclass": NoField,
}
READ: dict[str, Callable[[Tensor], Any]] = {
    "scalar": lambda x: x.sum(),
    "complex": lambda x: torch.complex(x, x),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "8 bits": lambda x: x.to(torch.float8_e4m3fn),
    "lazy clone": torch._lazy_clone,
    "half a character": lambda x: {"\ud800": x + 1},
    "a long name": lambda x: {"k" * 100_000: x + 1},
    "a subclass": lambda x: (x + 1).as_subclass(type("Plain", (Tensor,), {})),
    "an empty one": lambda x: x[:0],
}
NOTHING: dict[str, Callable[[Tensor], Any]] = {
    "no tensor": lambda x: ("a", None, {"b": 3, 4: b"c"}, object()),
    "fake": _fake,
}


def passed(make: Callable[[Tensor], Any], path: Path, **options: Any) -> Trace:
    """The trace of a model in which this goes out of one module and into another."""

    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return make(x)

    model = nn.Sequential(Makes(), nn.Identity())
    with trace(model, path, **options):
        model(X)
    found = read(path)
    assert found.ended and not found.notes
    assert one(found, "0", "in").max == 5
    return found


OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"gradients": True, "stats": ["max", ("f", Tensor.numel)], "tensors": ""}],
    ids=["usual", "all"],
)


@OPTIONS
@pytest.mark.parametrize("kind", NOTED)
def test_what_holds_no_numbers_has_a_note(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    found = passed(NOTED[kind], tmp_path / "run.jsonl", **options)
    for record in (one(found, "0", "out"), one(found, "1", "in"), one(found, "1", "out")):
        if record.same is None:
            assert record.extra["note"] and record.sketch is None, kind


@OPTIONS
@pytest.mark.parametrize("kind", READ)
def test_what_holds_numbers_is_read(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    found = passed(READ[kind], tmp_path / "run.jsonl", **options)
    assert one(found, "0", "out").n == (0 if kind == "an empty one" else found.records[-1].n)
    assert "note" not in one(found, "0", "out").extra


@OPTIONS
@pytest.mark.parametrize("kind", NOTHING)
def test_what_has_no_tensor_is_nothing(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    passed(NOTHING[kind], tmp_path / "run.jsonl", **options)


def test_what_can_be_said_of_a_tensor_that_refuses(tmp_path: Path) -> None:
    found = passed(NOTED["refuses"], tmp_path / "run.jsonl")
    record = one(found, "0", "out")
    assert (record.shape, record.dtype, record.n) == ((0,), "unknown", 0)
    assert (
        record.extra["note"] == "a Refuses that cannot be read (RuntimeError: no operation on this)"
    )


def transformed(x: Tensor) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    weights = dict(model.named_parameters())
    yield model, lambda: torch.vmap(model)(x)
    yield model, lambda: torch.func.grad(lambda x: model(x).sum())(x)
    yield model, lambda: torch.func.jacrev(lambda x: model(x).sum())(x)
    yield model, lambda: torch.func.functional_call(model, weights, (x,))
    yield model, lambda: torch.func.functionalize(model)(x)
    yield model, lambda: torch.func.jvp(model, (x,), (x,))[1]


@pytest.mark.parametrize("index", range(6))
def test_functions_of_torch_func(tmp_path: Path, index: int) -> None:
    model, call = list(transformed(X))[index]
    expected = call()
    with trace(model, tmp_path / "run.jsonl"):
        assert call().equal(expected)
    assert read(tmp_path / "run.jsonl").ended


class Broken(nn.Module):
    """A module whose weight cannot be read either."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


WEIGHTS: dict[str, Callable[[], nn.Module]] = {
    "wrapper": lambda: Broken(Wraps(X)),
    "sparse": lambda: Broken(X.to_sparse()),
    "meta": lambda: Broken(X.to("meta")),
    "freed": lambda: Broken(_freed(X)),
    "nested": lambda: Broken(nested([X, X[:1]], torch.strided)),
    "jagged": lambda: Broken(nested([X, X[:1]], torch.jagged)),
    "not initialised": lambda: nn.Sequential(nn.Identity(), nn.LazyLinear(3)),
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("perturb", [None, 3])
def test_weights_of_any_kind(tmp_path: Path, kind: str, perturb: int | None) -> None:
    model = WEIGHTS[kind]()
    with trace(model, tmp_path / "run.jsonl", parameters=True, perturb=perturb):
        model(X)
    assert read(tmp_path / "run.jsonl").ended


def test_a_hook_of_gradients_never_ends_a_backward_pass(tmp_path: Path) -> None:
    def sparse_gradient(x: Tensor) -> Tensor:
        return nn.functional.embedding(torch.tensor([1, 0, 1]), x, sparse=True)

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sparse_gradient(x)

    model = nn.Sequential(Looks())
    x = X.clone().requires_grad_()
    with trace(model, tmp_path / "run.jsonl", gradients=True):
        model(x).sum().backward()
    assert x.grad is not None and x.grad.is_sparse
    found = read(tmp_path / "run.jsonl")
    assert "sparse" in one(found, "0", "grad_in").extra["note"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_with_nested_tensors(tmp_path: Path, backend: str) -> None:
    class Packs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    torch._dynamo.reset()
    model = nn.Sequential(Packs(), nn.Identity())
    t = nested([X, X[:1]], torch.jagged)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad(), trace(model, tmp_path / "run.jsonl"):
        assert torch.cat(compiled(t).unbind()).equal(torch.cat([X, X[:1]]) * 2)
    torch._dynamo.reset()
    found = read(tmp_path / "run.jsonl")
    assert found.ended
    json.dumps([record.to_dict() for record in found.records])
