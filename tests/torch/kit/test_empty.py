"""Calls without batch, queries or keys: zeros, the lse of empty rows, and gradients that are 0."""

import pytest
import torch

from polyattn import Alibi, Causal, DenseBias, Packed, Unsupported
from polyattn.selection.registry import Available, registry
from polyattn.torch import attention

BACKENDS = [
    name
    for name in registry.names("torch")
    if isinstance(registry.probe(("torch", name)), Available)
    and "cpu" in registry["torch", name].capabilities_for("cpu").devices
]
SIZES = [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)]


def _inputs(b: int, t: int, s: int, layout: str) -> tuple[torch.Tensor, ...]:
    shapes = ((b, t, 4, 8), (b, s, 2, 8), (b, s, 2, 8))
    arrays = (torch.randn(shape) for shape in shapes)
    if layout == "BNTH":
        arrays = (x.transpose(1, 2).contiguous() for x in arrays)
    return tuple(x.requires_grad_() for x in arrays)


def _each_is_zero(loss: torch.Tensor, leaves: tuple[torch.Tensor, ...]) -> None:
    grads = torch.autograd.grad(loss, leaves, retain_graph=True)
    for leaf, grad in zip(leaves, grads, strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_gradients_are_zeros(name: str, sizes: tuple[int, int, int], layout: str) -> None:
    q, k, v = _inputs(*sizes, layout)
    _, t, s = sizes
    for options, extra in _extras(t, s):
        for lse in (False, True):
            try:
                result = attention(
                    q, k, v, mask=Causal(), layout=layout, return_lse=lse, backend=name, **options
                )
            except Unsupported:
                continue
            out, *sums = result if lse else (result,)
            _each_is_zero(out.sum(), (q, k, v, *extra))
            for each in sums:
                assert each.requires_grad
                _each_is_zero(each.exp().sum(), (q, k, v))
                if extra and "bias" in options:
                    _each_is_zero(each.exp().sum(), extra)


def _extras(t: int, s: int) -> list[tuple[dict[str, object], tuple[torch.Tensor, ...]]]:
    bias = torch.randn(1, 4, t, s, requires_grad=True)
    slopes = torch.rand(4, requires_grad=True)
    sinks = torch.randn(4, 3, requires_grad=True)
    return [
        ({}, ()),
        ({"bias": DenseBias(bias)}, (bias,)),
        ({"bias": Alibi(slopes)}, (slopes,)),
        ({"sinks": sinks}, (sinks,)),
    ]


def test_without_keys_the_lse_is_that_of_the_sinks_and_so_is_its_gradient() -> None:
    q, k, v = _inputs(2, 3, 0, "BTNH")
    sinks = torch.randn(4, 3, requires_grad=True)
    _, lse = attention(q, k, v, sinks=sinks, return_lse=True)
    assert torch.equal(lse, sinks.logsumexp(-1)[None, :, None].expand(2, 4, 3))
    grad, *zeros = torch.autograd.grad(lse.sum(), (sinks, q, k, v))
    torch.testing.assert_close(grad, 6 * sinks.softmax(-1))
    assert all(torch.equal(x, torch.zeros_like(x)) for x in zeros)


def test_one_input_that_trains_is_enough() -> None:
    for name in ("query", "key", "value", "sinks", "bias"):
        q, k, v = (x.detach() for x in _inputs(0, 3, 4, "BTNH"))
        sinks, bias = torch.randn(4), torch.randn(1, 1, 3, 4)
        leaf = {"query": q, "key": k, "value": v, "sinks": sinks, "bias": bias}[name]
        leaf.requires_grad_()
        out, lse = attention(q, k, v, sinks=sinks, bias=DenseBias(bias), return_lse=True)
        assert out.requires_grad and lse.requires_grad
        _each_is_zero(out.sum() + lse.sum(), (leaf,))


def test_packed_calls_without_tokens() -> None:
    q, k = torch.randn(0, 4, 8, requires_grad=True), torch.randn(5, 2, 8, requires_grad=True)
    mask = Packed(torch.tensor([0, 0, 0]), torch.tensor([0, 2, 5]))
    out, lse = attention(q, k, k, mask=mask, layout="packed", return_lse=True)
    assert out.shape == (0, 4, 8)
    assert lse.shape == (4, 0)
    _each_is_zero(out.sum() + lse.sum(), (q, k))


def test_nothing_is_poisoned_by_what_is_there() -> None:
    q, k, v = _inputs(2, 0, 4, "BTNH")
    bad = torch.full_like(k, float("nan"), requires_grad=True)
    out, lse = attention(q, bad, v, return_lse=True)
    _each_is_zero(out.sum() + lse.sum(), (q, bad, v))


@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
def test_compiled(sizes: tuple[int, int, int]) -> None:
    q, k, v = _inputs(*sizes, "BTNH")
    sinks = torch.randn(4, requires_grad=True)
    bias = torch.randn(1, 1, *sizes[1:], requires_grad=True)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=False)
    def f(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, sinks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return attention(q, k, v, bias=DenseBias(bias), sinks=sinks, return_lse=True)

    out, lse = f(q, k, v, bias, sinks)
    assert out.requires_grad and lse.requires_grad
    _each_is_zero(out.sum(), (q, k, v, bias, sinks))
    _each_is_zero(lse.exp().sum(), (q, k, v, bias))


def test_without_gradients_nothing_is_recorded() -> None:
    q, k, v = _inputs(2, 3, 0, "BTNH")
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    assert not attention(q.detach(), k.detach(), v.detach()).requires_grad
