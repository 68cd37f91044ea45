"""Programs written down for others: torch.export, torch.jit.trace, ONNX; torch.fx, meta."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyattn import (
    Alibi,
    Causal,
    Chunked,
    Dense,
    DenseBias,
    FirstKeys,
    InvalidProblem,
    LeftPadding,
    Packed,
    Padding,
    Unsupported,
    Window,
    record_selections,
    use_backend,
)
from polyattn.torch import attention, explain
from polyattn.torch import scaled_dot_product_attention as sdpa

BATCH = torch.export.Dim("batch", min=1, max=64)
QUERIES = torch.export.Dim("queries", min=2, max=4096)
KEYS = torch.export.Dim("keys", min=2, max=4096)


class Attends(nn.Module):
    """A call of attention, with what it takes beside q, k and v made of one further tensor."""

    def __init__(self, made: Callable[[Tensor], dict[str, Any]], **options: Any) -> None:
        super().__init__()
        self.made, self.options = made, options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extra: Tensor) -> Any:
        return attention(q, k, v, **self.options, **self.made(extra))


def lengths(b: int, t: int, s: int) -> Tensor:
    return torch.randint(1, s + 1, (b,))


CALLS: dict[str, tuple[Callable[[Tensor], dict[str, Any]], dict[str, Any], Any, Any]] = {
    # what is made of the extra tensor, options, the extra tensor, and which of its sizes are open
    "plain": (lambda x: {}, {}, lambda b, t, s: torch.zeros(1), {}),
    "causal": (lambda x: {"mask": Causal()}, {}, lambda b, t, s: torch.zeros(1), {}),
    "top left": (lambda x: {"mask": Causal("top_left")}, {}, lambda b, t, s: torch.zeros(1), {}),
    "window": (
        lambda x: {"mask": Causal() & Window(left=3)}, {"scale": 0.3},
        lambda b, t, s: torch.zeros(1), {},
    ),
    "chunked or first": (
        lambda x: {"mask": Causal() & (Chunked(4) | FirstKeys(2))}, {},
        lambda b, t, s: torch.zeros(1), {},
    ),
    "padding": (lambda x: {"mask": Padding(kv_lengths=x)}, {}, lengths, {0: BATCH}),
    "left padding": (
        lambda x: {"mask": Causal() & LeftPadding(x)}, {}, lambda b, t, s: torch.zeros(b).int(),
        {0: BATCH},
    ),
    "dense": (
        lambda x: {"mask": Dense(x)}, {}, lambda b, t, s: torch.rand(b, 1, t, s) > 0.4,
        {0: BATCH, 2: QUERIES, 3: KEYS},
    ),
    "bias": (
        lambda x: {"bias": DenseBias(x), "mask": Causal()}, {},
        lambda b, t, s: torch.randn(b, 4, t, s), {0: BATCH, 2: QUERIES, 3: KEYS},
    ),
    "alibi": (lambda x: {"bias": Alibi(x)}, {}, lambda b, t, s: torch.rand(4), {}),
    "sinks": (lambda x: {"sinks": x, "mask": Causal()}, {}, lambda b, t, s: torch.randn(4), {}),
    "soft cap": (
        lambda x: {"mask": Causal()}, {"softcap": 5.0}, lambda b, t, s: torch.zeros(1), {},
    ),
    "lse": (
        lambda x: {"mask": Padding(kv_lengths=x)}, {"return_lse": True}, lengths, {0: BATCH},
    ),
}  # fmt: skip


def inputs(name: str, b: int, t: int, s: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(b + t + s)
    q, k, v = (torch.randn(b, n, heads, 16).to(dtype) for n, heads in ((t, 4), (s, 2), (s, 2)))
    return q, k, v, CALLS[name][2](b, t, s)


def check(program: Callable[..., Any], model: Attends, given: Any, atol: float = 2e-6) -> None:
    with use_backend("reference"):
        wanted = model(*given)
    torch.testing.assert_close(program(*given), wanted, atol=atol, rtol=2e-5)


def operators(program: torch.export.ExportedProgram) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


STRICT = ("plain", "window", "padding", "dense", "soft cap")


@pytest.mark.parametrize(
    ("name", "strict"), [(name, False) for name in CALLS] + [(name, True) for name in STRICT]
)
def test_an_exported_program_serves_all_sizes_left_open(name: str, strict: bool) -> None:
    made, options, _, open_sizes = CALLS[name]
    model = Attends(made, **options)
    shapes = ({0: BATCH, 1: QUERIES}, {0: BATCH, 1: KEYS}, {0: BATCH, 1: KEYS}, open_sizes)
    given = inputs(name, 2, 9, 13)
    program = torch.export.export(model, given, dynamic_shapes=shapes, strict=strict)
    assert not [each for each in operators(program) if "polyattn" in each]
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    for sizes in ((2, 9, 13), (3, 13, 40), (5, 8, 8), (2, 2, 33)):
        check(loaded, model, inputs(name, *sizes))


@pytest.mark.parametrize("name", ["plain", "causal", "window", "padding", "sinks"])
def test_what_torch_can_say_stands_as_its_own_function(name: str) -> None:
    made, options, *_ = CALLS[name]
    program = torch.export.export(Attends(made, **options), inputs(name, 2, 9, 13))
    assert "aten.scaled_dot_product_attention.default" in operators(program)


@pytest.mark.parametrize("name", CALLS)
def test_a_traced_program_serves_other_sizes(name: str) -> None:
    made, options, *_ = CALLS[name]
    model = Attends(made, **options)
    model(*inputs(name, 2, 9, 13))  # a remembered call is not what is written down
    with warnings.catch_warnings():
        silent = name in ("plain", "causal", "top left", "window", "chunked or first", "soft cap")
        warnings.simplefilter("error" if silent else "ignore", torch.jit.TracerWarning)
        traced = torch.jit.trace(model, inputs(name, 2, 9, 13), check_trace=False)
    for sizes in ((2, 9, 13), (3, 13, 40), (5, 8, 8)):
        check(traced, model, inputs(name, *sizes))


def test_a_traced_program_of_jagged_rows() -> None:
    model = Attends(lambda cu: {"mask": Packed(cu) & Causal()}, layout="packed")
    q, cu = torch.randn(10, 2, 8), torch.tensor([0, 4, 10])
    rows = torch.export.Dim("rows", min=2, max=512)
    shapes = ({0: rows}, {0: rows}, {0: rows}, {0: torch.export.Dim("offsets", min=3, max=9)})
    program = torch.export.export(model, (q, q, q, cu), dynamic_shapes=shapes).module()
    for ends in ([0, 4, 10], [0, 3, 5, 20]):
        q = torch.randn(ends[-1], 2, 8)
        check(program, model, (q, q, q, torch.tensor(ends)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["causal", "bias", "sinks", "soft cap"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    made, options, *_ = CALLS[name]
    model = Attends(made, **options)
    given = inputs(name, 2, 9, 13, dtype)
    program = torch.export.export(model, given).module()
    check(program, model, given, 1e-12 if dtype == torch.float64 else 2e-2)


def test_alibi_is_no_coarser_than_its_distances() -> None:
    q, k, v = (torch.randn(1, n, 2, 32, dtype=torch.bfloat16) for n in (69, 7, 7))
    slopes = torch.tensor([0.31, 0.47], dtype=torch.bfloat16)
    exact = attention(*(x.double() for x in (q, k, v)), bias=Alibi(slopes.double()))
    out = attention(q, k, v, bias=Alibi(slopes), backend="portable")
    torch.testing.assert_close(out.double(), exact, rtol=8e-3, atol=8e-3)


def test_gradients_go_through_an_exported_program() -> None:
    model = Attends(*CALLS["window"][:1])
    q, k, v, x = inputs("window", 2, 9, 9)
    program = torch.export.export(model, (q, k, v, x)).module()
    grads = []
    for run in (program, model):
        leaves = [y.clone().requires_grad_() for y in (q, k, v)]
        run(*leaves, x).square().sum().backward()
        grads.append([y.grad for y in leaves])
    torch.testing.assert_close(*grads)


def test_masked_keys_do_not_leak_from_an_exported_program() -> None:
    model = Attends(*CALLS["padding"][:1])
    q, k, v, x = inputs("padding", 2, 9, 13)
    x = torch.tensor([5, 0])
    program = torch.export.export(model, (q, k, v, x)).module()
    k[:, 5:], v[:, 5:] = float("nan"), float("nan")
    check(program, model, (q, k, v, x))
    assert (program(q, k, v, x)[1] == 0).all()


@pytest.mark.parametrize("strict", [False, True])
def test_a_request_is_met_in_an_export(strict: bool) -> None:
    model, given = Attends(*CALLS["causal"][:1]), inputs("causal", 2, 9, 9)
    with use_backend("sdpa_flash"):
        program = torch.export.export(model, given, strict=strict)
    assert any("flash" in each for each in operators(program))
    with use_backend("portable"), record_selections() as ran:
        program = torch.export.export(model, given, strict=strict)
    assert "aten.scaled_dot_product_attention.default" in operators(program)
    assert {(each.backend, str(each.source)) for each in ran} == {("portable", "SCOPE")}
    with use_backend("sdpa_cudnn"), pytest.raises(Unsupported):
        torch.export.export(model, given, strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_recorders_hear_why(strict: bool) -> None:
    model, given = Attends(*CALLS["causal"][:1]), inputs("causal", 2, 9, 9)
    with record_selections() as ran:
        torch.export.export(model, given, strict=strict)
    assert {each.backend for each in ran} == {"portable"}
    assert "exported" in ran[0].reason


def test_compiled_code_is_not_taken_for_exported() -> None:
    q = torch.randn(1, 64, 4, 32)
    with record_selections() as ran:
        torch.compile(lambda x: attention(x, x, x), backend="eager")(q)
    assert "portable" not in {each.backend for each in ran}


@pytest.mark.parametrize("strict", [False, True])
def test_wrong_calls_are_said_while_exporting(strict: bool) -> None:
    q, k, v, x = inputs("causal", 2, 9, 9)
    model = Attends(lambda y: {"softcap": -1.0})
    with pytest.raises(Exception, match="softcap"):
        torch.export.export(model, (q, k, v, x), strict=strict)
    with pytest.raises(Exception, match="expected one batch size"):
        torch.export.export(Attends(lambda y: {}), (q, k[:1], v, x), strict=strict)


def test_a_traced_program_of_the_drop_in_serves_other_sizes() -> None:
    traced = torch.jit.trace(
        lambda x: sdpa(x, x, x, is_causal=True), torch.randn(1, 2, 5, 8), check_trace=False
    )
    x = torch.randn(3, 2, 11, 8)
    torch.testing.assert_close(traced(x), sdpa(x, x, x, is_causal=True))


# --- ONNX ---


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.slow
def test_onnx_gives_the_same_for_other_sizes(name: str) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    made, options, _, open_sizes = CALLS[name]
    model, given = Attends(made, **options), inputs(name, 2, 9, 13)
    shapes = ({0: BATCH, 1: QUERIES}, {0: BATCH, 1: KEYS}, {0: BATCH, 1: KEYS}, open_sizes)
    program = torch.onnx.export(model, given, dynamo=True, dynamic_shapes=shapes, verbose=False)
    stored = io.BytesIO()
    program.save(stored)
    session = runtime.InferenceSession(stored.getvalue(), providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    for sizes in ((2, 9, 13), (3, 13, 40), (5, 8, 8)):
        other = inputs(name, *sizes)
        feed = dict(zip(["q", "k", "v", "extra"], (x.numpy() for x in other), strict=True))
        out = session.run(None, {key: feed[key] for key in names})
        with use_backend("reference"):
            wanted = model(*other)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for ours, theirs in zip(out, wanted, strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), theirs, atol=5e-6, rtol=5e-5)


# --- torch.fx ---


def test_fx_holds_a_call_with_its_mask() -> None:
    model = Attends(lambda x: {"mask": Causal() & Window(left=3), "sinks": x})
    graph = torch.fx.symbolic_trace(model)
    assert attention in {node.target for node in graph.graph.nodes}
    given = (*inputs("sinks", 2, 9, 9)[:3], torch.randn(4))
    torch.testing.assert_close(graph(*given), model(*given))
    assert str(explain(*given[:3], mask=Causal())) != ""


# --- tensors without values ---


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_meta_tensors_give_shapes(layout: str) -> None:
    q, k = torch.empty(2, 8, 8, 16, device="meta"), torch.empty(2, 8, 8, 24, device="meta")
    out, lse = attention(q, q, k, mask=Causal(), softcap=3.0, layout=layout, return_lse=True)
    assert (out.shape, out.device.type, out.dtype) == ((2, 8, 8, 24), "meta", torch.float32)
    assert (lse.shape, lse.dtype) == ((2, 8, 8), torch.float32)


def test_a_model_on_meta_has_gradients_of_the_right_shapes() -> None:
    q = torch.empty(2, 8, 4, 16, device="meta", requires_grad=True, dtype=torch.bfloat16)
    attention(q, q, q, mask=Causal() & Window(left=2)).sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape and q.grad.dtype == torch.bfloat16


def test_a_wrong_call_on_meta_is_said() -> None:
    q = torch.empty(2, 8, 4, 16, device="meta")
    with pytest.raises(InvalidProblem, match="expected one batch size"):
        attention(q, q[:1], q[:1])
    with pytest.raises(Unsupported, match="meta"):
        attention(q, q, q, backend="sdpa_flash")
