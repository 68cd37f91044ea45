"""Autocast with inputs of several dtypes: what torch casts is cast, and nothing without it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from polyattn import Causal, InvalidProblem, record_selections
from polyattn.torch import attention
from polyattn.torch import scaled_dot_product_attention as sdpa

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Q, K, V = torch.randn(3, 2, 4, 70, 16)


def inputs(dtypes: tuple[torch.dtype, ...]) -> list[torch.Tensor]:
    return [x.to(dtype) for x, dtype in zip((Q, K, V), dtypes, strict=True)]


def exact(dtypes: tuple[torch.dtype, ...], cast: torch.dtype) -> torch.Tensor:
    q, k, v = (x.to(cast).double() for x in inputs(dtypes))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("dtypes", itertools.product(DTYPES, repeat=3), ids=str)
def test_calls_are_taken_and_refused_as_torch_does(dtypes: tuple[torch.dtype, ...]) -> None:
    q, k, v = inputs(dtypes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if torch.float64 in dtypes and len(set(dtypes)) > 1:
            with pytest.raises(RuntimeError):
                F.scaled_dot_product_attention(q, k, v, is_causal=True)
            with pytest.raises(RuntimeError):
                sdpa(q, k, v, is_causal=True)
            with pytest.raises(InvalidProblem, match="expected one dtype"):
                attention(q, k, v, mask=Causal(), layout="BNTH")
            return
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with record_selections() as ran:
            ours = [
                sdpa(q, k, v, is_causal=True),
                attention(q, k, v, mask=Causal(), layout="BNTH"),
                attention(q, k, v, mask=Causal(), layout="BNTH"),
            ]
    assert "torch" not in [choice.backend for choice in ran]
    want = exact(dtypes, theirs.dtype)
    bound = 2 * (theirs.double() - want).abs().max() + torch.finfo(theirs.dtype).eps
    for out in ours:
        assert out.dtype == theirs.dtype
        assert (out.double() - want).abs().max() <= bound


@pytest.mark.parametrize("dtypes", [DTYPES[:3], DTYPES[1::-1] + DTYPES[:1]], ids=str)
def test_compiled_and_trained(dtypes: tuple[torch.dtype, ...]) -> None:
    def loss(q: Any, k: Any, v: Any, function: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(q, k, v).float().square().sum()

    ways = (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        lambda q, k, v: attention(q, k, v, mask=Causal(), layout="BNTH"),
    )
    found = []
    for number, way in enumerate((*ways, *ways[1:])):
        torch._dynamo.reset()
        leaves = [x.requires_grad_() for x in inputs(dtypes)]
        call = loss
        if number > 2:
            call = torch.compile(loss, fullgraph=True, backend="aot_eager")
        found.append(torch.autograd.grad(call(*leaves, way), leaves))
    for grads in found[1:]:
        for ours, theirs, dtype in zip(grads, found[0], dtypes, strict=True):
            assert ours.dtype == theirs.dtype == dtype
            torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)


def test_without_autocast_nothing_is_cast() -> None:
    q, k, v = inputs((torch.float32, torch.bfloat16, torch.float32))
    with pytest.raises(InvalidProblem, match="cast or move it"):
        attention(q, k, v, layout="BNTH")
    with pytest.raises(RuntimeError) as theirs:
        F.scaled_dot_product_attention(q, k, v)
    with pytest.raises(RuntimeError) as ours:
        sdpa(q, k, v)
    assert str(ours.value) == str(theirs.value)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attention(q, k, v, layout="BNTH")
    with pytest.raises(InvalidProblem, match="cast or move it"):
        attention(q, k, v, layout="BNTH")


PLAIN = ("sdpa_math", "portable", "flex", "native_cpu", "reference")
"""Some of them compute by products that autocast would cast down once more."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("backend", "how"),
    [(backend, "eager") for backend in PLAIN]
    + [(backend, "compiled") for backend in PLAIN if backend != "flex"],  # which takes no such call
)
def test_nothing_is_cast_down_again_within_a_call(
    backend: str, how: str, dtype: torch.dtype
) -> None:
    given = [(2 * x).to(dtype) for x in (Q, K, V)]

    def call(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(q, k, v, mask=Causal(), layout="BNTH", backend=backend)

    def stock(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def found(function: Any, arrays: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in arrays]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out.double().sin().sum(), leaves)]

    wide = [x.bfloat16().double() for x in given]
    want = found(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), wide)
    if how == "compiled":
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager")
    for ours, theirs, exact in zip(found(call, given), found(stock, given), want, strict=True):
        bound = 2 * (theirs.double() - exact).abs().max() + torch.finfo(torch.bfloat16).eps
        assert (ours.double() - exact).abs().max() <= bound


@pytest.mark.parametrize("how", ["eager", "exported", "strictly exported"])
def test_sums_and_sinks_of_portable_calls_stay_in_float32(how: str) -> None:
    class Block(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, sinks: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return attention(
                    q, k, v, mask=Causal(), sinks=sinks, softcap=20.0, layout="BNTH",
                    return_lse=True, backend="portable",
                )  # fmt: skip

    given = [(2 * x).bfloat16() for x in (Q, K, V)]
    sinks, block = torch.randn(4), Block()
    exact = attention(
        *(x.double() for x in given), mask=Causal(), sinks=sinks.double(), softcap=20.0,
        layout="BNTH", return_lse=True, backend="reference",
    )  # fmt: skip
    if how != "eager":
        strict = how != "exported"
        block = torch.export.export(block, (*given, sinks), strict=strict).module()
    out, lse = block(*given, sinks)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), exact[0], rtol=2e-2, atol=2e-2)
