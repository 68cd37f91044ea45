"""torch's attention layers in inference: routed where it is worth it, said where it is not."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from polyattn import Unsupported, record_selections, use_backend
from polyattn.integrations import fused_layers
from polyattn.integrations.sdpa_patch import route_sdpa

MHA = "nn.MultiheadAttention's fused path: "
LAYER = "nn.TransformerEncoderLayer's fused path: "
SMALL = "too small to gain"
B, T, D, N = 3, 70, 64, 4
torch.manual_seed(1)
X = torch.randn(B, T, D)
PADDED = torch.arange(T) >= torch.tensor([T, 31, 5])[:, None]
ABOVE = torch.ones(T, T, dtype=torch.bool).triu(1)
SCATTERED = (torch.rand(B * N, T, T) > 0.6).index_fill(2, torch.tensor(0), False)


class Heard:
    def __init__(self) -> None:
        self.masks: list[str] = []
        self.backends: list[str] = []
        self.reasons: list[str] = []

    def ran(self, selection: Any, call: Any) -> None:
        self.backends.append(selection.backend)
        self.masks.append(str(selection.problem.mask and selection.problem.mask.signature))

    def passed(self, reason: str, call: Any) -> None:
        self.reasons.append(reason)


@pytest.fixture
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "WORTH_WORK", 0)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def mha(**options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(D, N, batch_first=True, **options).eval()


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(D, N, 96, batch_first=True, **options).eval()


def encoder() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(layer(), 2).eval()


def of_mha(x: Any, m: Any, **options: Any) -> Any:
    return m(x, x, x, need_weights=False, **options)[0]


def of_layer(x: Any, m: Any, **options: Any) -> Any:
    return m(x, **options)


CASES: dict[str, tuple[Callable[[], Any], Callable[..., Any], dict[str, Any], str]] = {
    "mha": (mha, of_mha, {}, "None"),
    "mha, padded": (mha, of_mha, {"key_padding_mask": PADDED}, "Padding(q=None, kv=3)"),
    "mha, nothing padded": (mha, of_mha, {"key_padding_mask": PADDED & False}, "None"),
    "mha, padded left": (mha, of_mha, {"key_padding_mask": PADDED.flip(1)}, "Dense(3x1x1x70)"),
    "mha, causal": (mha, of_mha, {"attn_mask": ABOVE}, "Causal('top_left')"),
    "mha, causal and padded": (
        mha, of_mha, {"attn_mask": ABOVE, "key_padding_mask": PADDED}, "Dense(3x4x70x70)",
    ),
    "mha, a mask a head": (mha, of_mha, {"attn_mask": SCATTERED}, "Dense(3x4x70x70)"),
    "layer": (layer, of_layer, {}, "None"),
    "layer, norm first, gelu": (
        lambda: layer(norm_first=True, activation="gelu"), of_layer, {}, "None",
    ),
    "layer, padded": (layer, of_layer, {"src_key_padding_mask": PADDED}, "Padding(q=None, kv=3)"),
    "layer, causal": (
        layer, of_layer,
        {"src_mask": nn.Transformer.generate_square_subsequent_mask(T), "is_causal": True},
        "Causal('top_left')",
    ),
    # torch's operator takes numbers for booleans
    "layer, a mask of numbers": (
        layer, of_layer, {"src_mask": SCATTERED[0] * -1.5}, "Dense(1x1x70x70)",
    ),
    "encoder": (encoder, of_layer, {}, "None"),
    "encoder, padded, nested inside": (
        encoder, of_layer, {"src_key_padding_mask": PADDED}, "Packed(q=4, kv=4)",
    ),
    "encoder, padded left": (
        encoder, of_layer, {"src_key_padding_mask": PADDED.flip(1)}, "Dense(3x1x1x70)",
    ),
}  # fmt: skip


def assert_as_right(got: Any, stock: Any, exact: Any) -> None:
    """At most twice as far from float64 as torch's operator is, and a few ulp."""
    assert got.shape == stock.shape and got.dtype == stock.dtype
    bound = 2 * (stock.double() - exact).abs().max()
    bound += 4 * torch.finfo(got.dtype).eps * exact.abs().max()
    assert (got.double() - exact).abs().max() <= bound


@pytest.mark.filterwarnings("ignore")  # torch's own, of nested tensors and masks of numbers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_layers_are_routed_and_as_right_as_torchs_operator(
    name: str, dtype: torch.dtype, worth_it: None
) -> None:
    make, call, options, mask = CASES[name]
    module, x = make().to(dtype), X.to(dtype)
    exact = call(x.double(), copy.deepcopy(module).double(), **options)
    stock = call(x, module, **options)
    heard = Heard()
    with route_sdpa(heard):
        got = call(x, module, **options)
    assert_as_right(got, stock, exact)
    assert set(heard.masks) == {mask} and heard.reasons == []
    assert len(heard.masks) == (2 if "encoder" in name else 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_small_ones_are_torchs_own_and_said(name: str) -> None:
    make, call, options, _ = CASES[name]
    module = make()
    stock = call(X[:, :T], module, **options)
    heard = Heard()
    with route_sdpa(heard):
        got = call(X, module, **options)
    assert torch.equal(got, stock) and heard.backends == []
    assert set(heard.reasons) == {(MHA if call is of_mha else LAYER) + SMALL}


@pytest.mark.filterwarnings("ignore")
def test_a_nested_input(worth_it: None) -> None:
    nested = torch.nested.nested_tensor([torch.randn(length, D) for length in (5, 70, 1)])
    for module, call in ((mha(), of_mha), (layer(), of_layer)):
        stock = call(nested, module)
        heard = Heard()
        with route_sdpa(heard):
            got = call(nested, module)
        assert got.is_nested and heard.masks == ["Packed(q=4, kv=4)"]
        for ours, theirs in zip(got.unbind(), stock.unbind(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_weights_are_torchs_own_and_said() -> None:
    heard = Heard()
    module = mha()
    stock = module(X, X, X)
    with route_sdpa(heard):
        got = module(X, X, X)
        with torch.enable_grad():
            trained = module.train()(X, X, X)
        module.eval()(X, X.clone(), X)
    assert all(torch.equal(a, b) for a, b in zip(got, stock, strict=True))
    torch.testing.assert_close(trained[1], stock[1], rtol=1e-4, atol=1e-5)
    why = "need_weights=True, and polyattn gives no weights"
    assert heard.reasons == [MHA + why, *[f"nn.MultiheadAttention: {why}"] * 2]
    assert heard.backends == []


def test_rows_without_keys_stay_torchs(worth_it: None) -> None:
    nobody = PADDED.clone()
    nobody[1] = True
    heard = Heard()
    module = mha()
    stock = of_mha(X, module, key_padding_mask=nobody)
    with route_sdpa(heard):
        got = of_mha(X, module, key_padding_mask=nobody)
        of_mha(X, module, attn_mask=ABOVE | torch.eye(T, dtype=torch.bool))
    assert torch.equal(got, stock) or bool(stock[1].isnan().all())
    torch.testing.assert_close(got, stock, rtol=0, atol=0, equal_nan=True)
    assert heard.reasons == [MHA + "rows that see no key, for which torch gives NaN"] * 2


def test_requests_hold_whatever_the_gain() -> None:
    heard = Heard()
    module = mha()
    stock = of_mha(X, module)
    with route_sdpa(heard, use_backend("sdpa_math")):
        torch.testing.assert_close(of_mha(X, module), stock, rtol=1e-5, atol=1e-5)
        thread = threading.Thread(target=of_mha, args=(X, module))
        thread.start()
        thread.join()
        with pytest.raises(Unsupported, match=r"torch's own nn\.MultiheadAttention, expected"):
            module(X, X, X)
        fallback = use_backend("native_cpu", on_unsupported="fallback")
        with fallback, record_selections() as ran:
            module(X, X, X)
    assert heard.backends == ["sdpa_math", "sdpa_math"]
    assert [choice.backend for choice in ran] == ["torch"]
    assert str(ran[0].fallback).startswith("SCOPE asks for native_cpu, but polyattn does not")


def test_what_is_no_plain_call_is_torchs(worth_it: None) -> None:
    heard = Heard()
    module = mha()
    wide = torch.nn.Parameter(X.clone())
    with route_sdpa(heard):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            in_autocast = of_mha(X, module)
        own = of_mha(X.as_subclass(Mine), module)
        of_mha(wide, module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(in_autocast, of_mha(X, module))
    torch.testing.assert_close(own, of_mha(X.as_subclass(Mine), module), rtol=1e-5, atol=1e-5)
    assert heard.reasons[0] == MHA + "under autocast, which its operator ignores"
    assert heard.backends[-1] != "torch"


class Mine(torch.Tensor):
    """A subclass that changes nothing."""


def places() -> tuple[Any, ...]:
    return (
        torch._native_multi_head_attention,
        torch._transformer_encoder_layer_fwd,
        nn.functional.multi_head_attention_forward,
    )


def test_the_places_are_restored() -> None:
    before = places()
    with route_sdpa(), route_sdpa():
        assert all(a is not b for a, b in zip(places(), before, strict=True))
    with pytest.raises(ZeroDivisionError), route_sdpa():
        raise ZeroDivisionError
    assert all(a is b for a, b in zip(places(), before, strict=True))


@pytest.mark.filterwarnings("ignore")  # torch's own, of torch.jit
@pytest.mark.parametrize("make", [mha, layer, encoder])
def test_graphs_hold_torchs_operators(make: Any, worth_it: None) -> None:
    module = make()
    call = of_mha if make is mha else of_layer
    stock = call(X, module)

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return call(x, self.inner)

    with route_sdpa():
        traced = torch.jit.trace(Called().eval(), (X,), check_trace=False)
        scripted = torch.jit.script(module)
        exported = torch.export.export(Called().eval(), (X,)).module()
    kinds = {node.kind().partition("::")[0] for node in traced.inlined_graph.nodes()}
    assert kinds <= {"aten", "prim"} and "polyattn" not in str(exported.code)
    found = [traced(X), exported(X)]
    if make is not mha:  # of which torch 2.13 scripts the operator, and fails on its second output
        found.append(scripted(X))
    for graph in found:
        torch.testing.assert_close(graph, stock, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", [mha, layer])
def test_compiled_layers_keep_working(make: Any, backend: str, worth_it: None) -> None:
    module = make()
    call = of_mha if make is mha else of_layer
    stock = call(X, module)
    for routed_first in (True, False):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: call(x, module), fullgraph=True, backend=backend)
        for number in range(4):
            if (number % 2 == 0) == routed_first:
                with route_sdpa(Heard()):
                    torch.testing.assert_close(compiled(X), stock, rtol=1e-4, atol=1e-5)
            else:
                torch.testing.assert_close(compiled(X), stock, rtol=1e-4, atol=1e-5)


def test_symbolic_traces_of_the_functional_form() -> None:
    weights = torch.randn(3 * D, D), torch.randn(3 * D), torch.randn(D, D), torch.randn(D)

    def call(x: Any) -> Any:
        return nn.functional.multi_head_attention_forward(
            x, x, x, D, N, *weights[:2], None, None, False, 0.0, *weights[2:], False
        )[0]

    with route_sdpa():
        graph = torch.fx.symbolic_trace(call)
    assert "polyattn" not in str([node.target for node in graph.graph.nodes])
    assert "torch.nn.functional.multi_head_attention_forward" in graph.code
    torch.testing.assert_close(graph(X), call(X))
