"""Lengths that are symbols: one graph serves many, traced with and without Dynamo."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch.fx.experimental.proxy_tensor import make_fx

from polyattn import (
    BlockMap,
    Causal,
    Chunked,
    Dense,
    DenseBias,
    FirstKeys,
    InvalidProblem,
    LeftPadding,
    Padding,
    Segments,
    Window,
)
from polyattn.torch import attention, explain
from polyattn.torch import scaled_dot_product_attention as sdpa


def counted(function: Any, **options: Any) -> tuple[Any, Any]:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_one_graph_serves_masks_of_many_lengths(kind: str, dynamic: bool | None) -> None:
    compiled, counter = counted(lambda q, m: sdpa(q, q, q, attn_mask=m), dynamic=dynamic)
    for length in (70, 90, 110, 75, 128, 101):
        q = torch.randn(2, 3, length, 16)
        mask = torch.rand(length, length) > 0.3 if kind == "bool" else torch.randn(length, length)
        mask[:, 0] = True
        torch.testing.assert_close(compiled(q, mask), sdpa(q, q, q, attn_mask=mask))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("door", [sdpa, attention])
@pytest.mark.parametrize("place", range(3))
def test_a_last_stride_that_is_a_symbol(door: Any, place: int) -> None:
    inputs = [torch.randn(2, 3, 5, 16) for _ in range(3)]
    inputs[place] = torch.randn(2, 3, 5, 32)[..., ::2]
    compiled, _ = counted(lambda q, k, v: door(q, k, v), dynamic=True)
    torch.testing.assert_close(compiled(*inputs), door(*inputs))


def test_flags_compared_from_sizes() -> None:
    def decode(q: Any, k: Any) -> Any:
        few = q.shape[1] != k.shape[1]
        return sdpa(q, k, k, is_causal=q.shape[2] > 1, enable_gqa=few)

    compiled, _ = counted(decode, dynamic=True)
    for heads, length in ((2, 5), (4, 1), (4, 7), (2, 1)):
        q, k = torch.randn(2, 4, length, 8), torch.randn(2, heads, 9, 8)
        torch.testing.assert_close(compiled(q, k), decode(q, k))


MASKS = {
    "dense": lambda b, t: Dense(torch.rand(t, t) > 0.2) & Causal(),
    "padding": lambda b, t: Padding(kv_lengths=torch.randint(0, t, (b,))) & Window(40),
    "segments": lambda b, t: Segments(torch.randint(0, 2, (b, t))),
    "blocks": lambda b, t: BlockMap(
        16, 16, torch.zeros(1, 1, -(-t // 16), 1).int(), torch.ones(1, 1, -(-t // 16)).int()
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_one_graph_serves_every_mask(name: str) -> None:
    compiled, counter = counted(lambda q, m: attention(q, q, q, mask=m), dynamic=True)
    for length in (70, 90, 110, 97):
        q, mask = torch.randn(3, length, 2, 16), MASKS[name](3, length)
        torch.testing.assert_close(compiled(q, mask), attention(q, q, q, mask=mask))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("batch", [5, 6, 7, 8])
def test_sizes_that_are_stood_in_for_alike_are_not_taken_for_each_other(batch: int) -> None:
    """Batches of 5 to 8 are of one class: a padding for another batch must be refused for each."""
    compiled, _ = counted(lambda q, m: attention(q, q, q, mask=m), dynamic=True)
    q = torch.randn(batch, 70, 2, 16)
    compiled(q, Padding(kv_lengths=torch.randint(1, 70, (batch,))))
    for other in (4, 9, batch - 1, batch + 1):
        with pytest.raises(InvalidProblem, match=rf"shape \({other},\), expected \({batch},\)"):
            compiled(q, Padding(kv_lengths=torch.randint(1, 70, (other,))))
    with pytest.raises(InvalidProblem, match="broadcastable"):
        compiled(q, Dense(torch.ones(8 if batch != 8 else 16, 1, 70, 70, dtype=torch.bool)))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("backend", [None, "native_cpu", "sdpa_math"])
@pytest.mark.parametrize(
    "mask",
    [
        None,
        Causal(),
        Padding(kv_lengths=[40, 70]),
        LeftPadding(kv_starts=[40, 70]) & (Chunked(16) | ~FirstKeys(20)),
    ],
    ids=str,
)
@pytest.mark.parametrize("before_autograd", [False, True])
def test_make_fx_in_every_mode(
    mode: str, backend: str | None, mask: Any, before_autograd: bool
) -> None:
    def function(q: torch.Tensor) -> Any:
        return attention(q, q, q, mask=mask, backend=backend)

    q = torch.randn(2, 70, 4, 16)
    graph = make_fx(function, tracing_mode=mode, pre_dispatch=before_autograd)(q)
    for x in (q, torch.randn(2, 90, 4, 16)) if mode == "symbolic" else (q, torch.randn_like(q)):
        torch.testing.assert_close(graph(x), function(x))


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_length_that_changes(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> Any:
            return attention(q, q, q, mask=Causal())

    dims = ({1: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(
        Model(), (torch.randn(2, 70, 4, 16),), dynamic_shapes=dims, strict=strict
    )
    x = torch.randn(2, 90, 4, 16)
    torch.testing.assert_close(exported.module()(x), attention(x, x, x, mask=Causal()))


def test_bias_of_changing_length_trains() -> None:
    compiled, counter = counted(
        lambda q, b: attention(q, q, q, bias=DenseBias(b)).sum(), dynamic=True
    )
    for length in (70, 90, 110):
        q = torch.randn(1, length, 2, 16)
        bias = torch.randn(length, length, requires_grad=True)
        (got,) = torch.autograd.grad(compiled(q, bias), bias)
        (expected,) = torch.autograd.grad(attention(q, q, q, bias=DenseBias(bias)).sum(), bias)
        torch.testing.assert_close(got, expected)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", [None, "native_cpu", "sdpa_math"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_cache_that_grows_is_compiled_as_often_as_the_choice_changes(
    masked: bool, backend: str | None
) -> None:
    """Once for the first length, once for those that differ, and once where the choice changes."""

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> Any:
        mask = Dense(seen) if masked else None
        return attention(q, k, v, mask=mask, layout="BNTH", backend=backend)

    compiled, graphs = counted(step)
    choices: list[str | None] = []
    for length in (12, 13, 16, 17, 32, 33, 64, 65, 96, 500, 512, 513, 1500, 4000, 9000):
        q, k, v = torch.randn(1, 8, 1, 64), *torch.randn(2, 1, 8, length, 64)
        seen = torch.arange(length).ge(2).expand(1, 1, 1, length)
        options: dict[str, Any] = {
            "mask": Dense(seen) if masked else None,
            "layout": "BNTH",
            "backend": backend,
        }
        want = attention(q, k, v, **options)
        problem = explain(q, k, v, **options).problem
        assert problem is not None
        choices.append(explain(problem.with_(compiled=True), backend=backend).backend)
        assert torch.allclose(compiled(q, k, v, seen), want, atol=1e-5)
    kept = [choice for choice, _ in itertools.groupby(choices)]  # it may change, and change back
    assert graphs.frame_count <= 2 + len(kept)  # and once where the operator pays, at 16 keys
