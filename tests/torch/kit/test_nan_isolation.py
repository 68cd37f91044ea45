"""What is masked never leaks: NaN, infinities and huge numbers, forward and backward."""

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from polyattn import (
    Causal,
    Dense,
    FirstKeys,
    LeftPadding,
    Mask,
    Padding,
    Segments,
    Unsupported,
    Window,
)
from polyattn.native import module as native_module
from polyattn.selection import scopes
from polyattn.selection.registry import Available, registry
from polyattn.torch import attention, scaled_dot_product_attention

Tensors = tuple[torch.Tensor, ...]
BACKENDS = [
    name
    for name in registry.names("torch")
    if isinstance(registry.probe(("torch", name)), Available)
    and "cpu" in registry["torch", name].capabilities_for("cpu").devices
]
NAN = float("nan")
FIRST = torch.zeros(5, 5, dtype=torch.bool)
FIRST[:, 0] = True
ONLY_THE_FIRST_KEY = {
    "padding": Padding(kv_lengths=[1]),
    "dense": Dense(FIRST),
    "first": FirstKeys(1),
    "not": ~LeftPadding(kv_starts=[1]),
    "or": Dense(FIRST) | Padding(kv_lengths=[1]),
}
TWO = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
APART = Segments(TWO, TWO)


def _run(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> Tensors:
    """Return the output, and the lse where the backend has one."""
    try:
        return attention(q, k, v, mask=mask, backend=name, return_lse=True)
    except Unsupported:
        return (attention(q, k, v, mask=mask, backend=name),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", ONLY_THE_FIRST_KEY.values(), ids=list(ONLY_THE_FIRST_KEY))
@pytest.mark.parametrize("name", BACKENDS)
def test_huge_masked_keys_change_nothing(name: str, mask: Mask, dtype: torch.dtype) -> None:
    q = torch.randn(1, 5, 4, 16, dtype=dtype)
    k, v = torch.randn(1, 5, 2, 16, dtype=dtype), torch.randn(1, 5, 2, 16, dtype=dtype)
    clean = _run(name, q, k, v, mask)
    for huge in (1e38, -1e38, 3.3e38):
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, 1:], bad_v[:, 1:] = huge, huge
        struck = _run(name, q, bad_k, bad_v, mask)
        assert all(torch.equal(x, y) for x, y in zip(struck, clean, strict=True))


@pytest.mark.parametrize("mask", [Causal(), Causal("top_left"), Causal() & Window(left=2)], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_rows_before_a_huge_key_keep_their_bits(name: str, mask: Mask) -> None:
    q, k, v = (torch.randn(2, 19, 2, 16) for _ in range(3))
    clean = _run(name, q, k, v, mask)
    k, v = k.clone(), v.clone()
    k[0, 7], v[0, 7] = 3e38, 3e38
    struck = _run(name, q, k, v, mask)
    assert torch.equal(struck[0][0, :7], clean[0][0, :7])
    assert torch.equal(struck[0][1], clean[0][1])
    assert all(
        torch.equal(x[0, :, :7], y[0, :, :7]) for x, y in zip(struck[1:], clean[1:], strict=True)
    )


def _crossed() -> Tensors:
    """Inputs whose scores overflow between segments in every direction, and in none."""
    sizes = torch.tensor([1e25, 1e25, 1e25, 1e-25, 1e-25, 1e-25, 1.0, 1.0]).view(1, -1, 1, 1)
    q, k, v = torch.randn(1, 8, 4, 16), torch.randn(1, 8, 2, 16), torch.randn(1, 8, 2, 16)
    return (q * sizes).requires_grad_(), (k / sizes).requires_grad_(), v.requires_grad_()


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_that_need_different_keys_hidden(name: str) -> None:
    q, k, v = _crossed()
    with torch.no_grad():
        out, *lse = _run(name, q, k, v, APART)
    exact = attention(q.double(), k.double(), v.double(), mask=APART, backend="reference")
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
    assert all(x.isfinite().all() for x in lse)


@pytest.mark.parametrize("name", BACKENDS)
def test_gradients_of_rows_that_need_different_keys_hidden(name: str) -> None:
    q, k, v = _crossed()
    dout = torch.randn(1, 8, 4, 16)
    grads = torch.autograd.grad(_run(name, q, k, v, APART)[0], (q, k, v), dout)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    truth = attention(*wide, mask=APART, backend="reference")
    for got, exact in zip(grads, torch.autograd.grad(truth, wide, dout.double()), strict=True):
        size = exact.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        assert ((got - exact).abs() / size).max() < 1e-3


def test_gradients_beside_masked_keys_whose_scores_overflow_before_the_cap() -> None:
    q = torch.tensor([[10.0, -10.0]], dtype=torch.float64).reshape(1, 1, 1, 2).requires_grad_()
    k = torch.tensor([[0.5, 0.25], [1e308, 1e308], [1.7e308, 1.7e308]], dtype=torch.float64)
    options = {"mask": Padding(kv_lengths=[1]), "softcap": 2.0, "scale": 4.0}
    v = torch.ones(1, 3, 1, 2).double()
    out = attention(q, k.reshape(1, 3, 1, 2), v, backend="reference", **options)
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_nan_comes_into_no_gradient_of_rows_that_do_not_see_it(name: str, where: str) -> None:
    q, k, v = (torch.randn(1, 8, n, 16) for n in (4, 2, 2))
    dout = torch.randn(1, 8, 4, 16)

    def gradients(k: torch.Tensor, v: torch.Tensor) -> Tensors:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(_run(name, *leaves, APART)[0], leaves, dout)

    bad_k, bad_v = k.clone(), v.clone()
    (bad_k if where == "key" else bad_v)[:, 4] = NAN
    others = TWO != 1
    for got, clean in zip(gradients(bad_k, bad_v), gradients(k, v), strict=True):
        torch.testing.assert_close(got[:, others], clean[:, others], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_that_sees_a_nan_is_nan_however_few_the_keys(name: str) -> None:
    for s in (1, 2, 7, 15, 16, 17):
        for mask in (None, Causal("top_left")):
            q, k, v = (torch.randn(1, n, 2, 16) for n in (5, s, s))
            q[0, 1, :, 3] = NAN
            out = attention(q, k, v, mask=mask, backend=name)
            assert out.isnan().all(-1).all(-1).tolist() == [[False, True, False, False, False]]
            q, k = torch.randn(1, 5, 2, 16), torch.full_like(k, NAN)
            assert attention(q, k, v, mask=mask, backend=name).isnan().all()


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_nan_query_beside_few_keys_compiled(causal: bool, layout: str) -> None:
    mask = Causal("top_left") if causal else None

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=False)
    def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return attention(q, k, k, mask=mask, layout=layout, backend="sdpa_flash")

    for s in (1, 7, 15, 20):
        torch.compiler.reset()  # which else takes the lengths for symbols, or compiles too often
        q, k = torch.randn(1, 3, 3, 16), torch.randn(1, s, 3, 16)
        q[0, 1, 1] = NAN
        out = attend(q, k if layout == "BTNH" else k.transpose(1, 2))
        assert out[0, 1, 1].isnan().all()
        assert int(out.isnan().any(-1).sum()) == 1


def test_few_keys_first_met_in_inference_can_be_trained_on() -> None:
    scopes.invalidate()
    q, k, v = torch.randn(1, 5, 2, 16), torch.randn(1, 3, 2, 16), torch.randn(1, 3, 2, 16)
    with torch.inference_mode():
        first = attention(q, k, v, backend="sdpa_flash")
    leaf = q.clone().requires_grad_()
    again = attention(leaf, k, v, backend="sdpa_flash")
    assert torch.equal(first, again)
    assert torch.autograd.grad(again.sum(), leaf)[0].isfinite().all()
    scopes.invalidate()
    with torch.device("meta"):  # where new tensors are made unless they say where
        leaf = q.clone().requires_grad_()
        assert torch.equal(attention(leaf, k, v, backend="sdpa_flash"), first)
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(x) for x in (q, k, v)]
        assert attention(*faked, backend="sdpa_flash").shape == q.shape


def test_few_keys_are_what_torch_computes() -> None:
    from polyattn.torch.dropin import torch_sdpa

    for s in (1, 3, 8, 15, 16):
        for causal in (False, True):
            leaves = [torch.randn(2, 3, s, 24, requires_grad=True) for _ in range(3)]
            dout = torch.randn(2, 3, s, 24)
            got = attention(
                *leaves, mask=Causal() if causal else None, layout="BNTH", backend="sdpa_flash"
            )
            expected = torch_sdpa(*leaves, is_causal=causal)
            assert torch.equal(got, expected)
            for ours, theirs in zip(
                torch.autograd.grad(got, leaves, dout),
                torch.autograd.grad(expected, leaves, dout),
                strict=True,
            ):
                assert torch.equal(ours, theirs)


MASKED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "causal": lambda q, m: scaled_dot_product_attention(q, q, q, is_causal=True),
    "dense": lambda q, m: scaled_dot_product_attention(q, q, q, attn_mask=m),
    "math": lambda q, m: attention(q, q, q, mask=Dense(m), layout="BNTH", backend="sdpa_math"),
    "flash": lambda q, m: attention(
        q, q, q, mask=Dense(m) & Causal(), layout="BNTH", backend="sdpa_flash", return_lse=True
    )[0],
    "flex": lambda q, m: attention(q, q, q, mask=Causal(), layout="BNTH", backend="flex"),
}


@pytest.mark.parametrize("before_autograd", [False, True])
@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("name", MASKED)
def test_make_fx_takes_masked_calls(name: str, mode: str, before_autograd: bool) -> None:
    if name == "flex" and before_autograd:
        pytest.skip("torch's vmap, which FlexAttention uses, is not traced before autograd")
    q, mask = torch.randn(2, 4, 16, 32), torch.ones(16, 16, dtype=torch.bool).tril()
    graph = make_fx(MASKED[name], tracing_mode=mode, pre_dispatch=before_autograd)(q, mask)
    other = torch.randn_like(q)
    torch.testing.assert_close(graph(other, mask), MASKED[name](other, mask))
    names = {str(node.target) for node in graph.graph.nodes}
    assert not any("aten.item" in x or "local_scalar" in x for x in names)


def test_other_dispatch_modes_do_not_cost_exactness() -> None:
    q, k, v = (torch.randn(1, 19, 2, 16) for _ in range(3))
    clean = attention(q, k, v, mask=Causal(), backend="sdpa_flash")
    v[0, 7] = NAN
    with FlopCounterMode(display=False):
        struck = attention(q, k, v, mask=Causal(), backend="sdpa_flash")
    assert torch.equal(struck[0, :7], clean[0, :7])


def test_jit_trace_of_the_kernels_reads_nothing() -> None:
    from polyattn.problem import MaskFacts, Problem
    from polyattn.torch.admission import admit

    q = torch.randn(1, 2, 16, 8)
    call = admit(q, q, q, mask=Causal(), layout="BNTH")
    assert isinstance(call.problem, Problem) and isinstance(call.problem.mask, MaskFacts)
    kernel = registry["sdpa_flash"].load()(call.problem, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(lambda x: kernel(x, x, x, call.mask), (q,), check_trace=False)
    assert torch.equal(traced(q), kernel(q, q, q, call.mask))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_zero_is_found_wherever_it_lies(dtype: torch.dtype) -> None:
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None or not isinstance(registry.probe(("torch", "native_cpu")), Available):
        pytest.skip("torch has no C exchange, or the extension is not built")
    has_zero = native_module.load().has_zero
    for shape in ((2, 3, 4, 5), (7,), (3, 1), (1, 1, 1, 1), (2, 0, 3), (2, 3, 0)):
        for order in itertools.islice(itertools.permutations(range(len(shape))), 8):
            x = torch.ones(shape, dtype=dtype).permute(order)
            assert has_zero(exchange, x) is False
            for place in itertools.product(*map(range, x.shape)):
                struck = x.clone(memory_format=torch.preserve_format)
                struck[place] = -0.0
                assert has_zero(exchange, struck) is True
    assert has_zero(exchange, torch.full((4, 2), float("nan"), dtype=dtype)) is False
    for wrong in (torch.zeros(2, dtype=torch.int32), torch.tensor(0.0), torch.zeros((1,) * 9)):
        with pytest.raises(ValueError, match="expected"):
            has_zero(exchange, wrong)


def test_values_that_are_zero_are_no_lost_nan() -> None:
    q, k = torch.randn(2, 5, 3, 16), torch.randn(2, 3, 3, 16)
    for v in (torch.zeros_like(k), k * (torch.arange(3) > 0)[:, None, None]):
        out = attention(q, k, v, backend="sdpa_flash")
        torch.testing.assert_close(out, attention(q, k, v, backend="reference"))
