"""Function transforms around a call: who computes derivatives beyond the first, and who refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

from polyattn import (
    BlockMap,
    Causal,
    InvalidProblem,
    LeftPadding,
    Padding,
    PrefixLM,
    Unsupported,
    record_selections,
)
from polyattn.selection.registry import Missing, registry
from polyattn.torch import attention, paged_attention

Function = Callable[[Tensor], Tensor]

TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "jvp": lambda f: lambda q: jvp(f, (q,), (q.sin(),))[1],
    "grad of grad": lambda f: grad(lambda q: grad(f)(q).sin().sum()),
    "jvp of grad": lambda f: lambda q: jvp(grad(f), (q,), (q.sin(),))[1],
    "grad of jvp": lambda f: grad(lambda q: jvp(f, (q,), (q.sin(),))[1]),
    "vmap of grad of grad": lambda f: (
        lambda q: vmap(grad(lambda p: grad(f)(p).sin().sum()))(torch.stack([q, q.cos()]))
    ),
}
transforms = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


def arrays(length: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(1, 2, length, 16) for _ in range(3))  # type: ignore[return-value]


def called(k: Tensor, v: Tensor, backend: str | None = None) -> Function:
    def function(q: Tensor) -> Tensor:
        out = attention(q, k, v, layout="BNTH", backend=backend)
        return out.square().sum()

    return function


def defined(k: Tensor, v: Tensor) -> Function:
    def function(q: Tensor) -> Tensor:
        scores = q.double() @ k.double().transpose(-1, -2) / 4
        return (scores.softmax(-1) @ v.double()).square().sum()

    return function


def agree(got: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(got.double(), exact.double(), rtol=1e-4, atol=1e-4)


@transforms
@pytest.mark.parametrize("length", [8, 100])
def test_what_is_chosen_has_the_derivatives(transform: Any, length: int) -> None:
    q, k, v = arrays(length)
    agree(transform(called(k, v))(q), transform(defined(k, v))(q))


@transforms
@pytest.mark.parametrize("backend", ["native_cpu", "sdpa_math", "portable", "reference", "flex"])
def test_backends_that_declare_them_have_them(transform: Any, backend: str) -> None:
    q, k, v = arrays(20)
    if isinstance(registry["torch", backend].probe(), Missing):
        pytest.skip(f"{backend} does not run here")
    agree(transform(called(k, v, backend))(q), transform(defined(k, v))(q))


@transforms
def test_a_kernel_without_them_refuses(transform: Any) -> None:
    q, k, v = arrays(8)
    with pytest.raises(Unsupported, match="function transforms for forward mode or beyond first"):
        transform(called(k, v, "sdpa_flash"))(q)


@transforms
@pytest.mark.parametrize("length", [8, 100])
def test_compiled_code_has_them(transform: Any, length: int) -> None:
    q, k, v = arrays(length)
    compiled = torch.compile(transform(called(k, v)), fullgraph=True, backend="aot_eager")
    agree(compiled(q), transform(defined(k, v))(q))


def test_one_level_is_not_taken_for_two() -> None:
    q, k, v = arrays(8)
    function, exact = called(k, v), defined(k, v)
    with record_selections() as ran:
        for _ in range(2):
            agree(grad(function)(q), grad(exact)(q))
            agree(hessian(function)(q), hessian(exact)(q))
            agree(TRANSFORMS["grad of grad"](function)(q), TRANSFORMS["grad of grad"](exact)(q))
    assert {x.problem.higher for x in ran} == {False, True}
    assert all(x.backend != "sdpa_flash" for x in ran if x.problem.higher)
    first = [x.backend for x in ran if not x.problem.higher]
    assert first == [first[0]] * 2


def test_first_derivatives_are_no_higher_ones() -> None:
    q, k, v = arrays(8)
    with record_selections() as ran:
        grad(called(k, v))(q)
        vmap(called(k, v, "native_cpu"))(torch.stack([q, q]))
    assert not any(x.problem.higher for x in ran)


def test_pages_have_them_where_they_are_gathered() -> None:
    """The native kernel for pages is no operator that transforms know."""
    if isinstance(registry["torch", "native_cpu"].probe(), Missing):
        pytest.skip("the extension is not built")
    pages_k, pages_v = torch.randn(2, 3, 4, 2, 16).unbind()
    table, lengths = torch.tensor([[2, 0]]), torch.tensor([6])
    q = torch.randn(1, 2, 2, 16)

    def function(q: Tensor, backend: str | None = None) -> Tensor:
        return paged_attention(q, pages_k, pages_v, table, lengths, backend=backend)

    with record_selections() as ran:
        _, found = jvp(function, (q,), (q.sin(),))
        function(q)
    assert [x.backend for x in ran] == ["reference", "native_cpu"]
    step = 1e-3 * q.sin()
    moved = (function(q + step) - function(q - step)) / 2e-3
    torch.testing.assert_close(found, moved, rtol=2e-2, atol=2e-3)
    with pytest.raises(Unsupported, match="function transforms and keys in pages"):
        jvp(lambda q: function(q, "native_cpu"), (q,), (q.sin(),))


LENGTHS = torch.tensor([[3, 6], [2, 2], [6, 1]])
MAPPED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "padding": (lambda x: Padding(q_lengths=x, kv_lengths=x), (LENGTHS,)),
    "left padding": (lambda x: LeftPadding(kv_starts=x) & Causal(), (6 - LENGTHS,)),
    "prefix": (PrefixLM, (LENGTHS,)),
    "blocks": (
        lambda i, n: BlockMap(3, 3, i, n),
        (
            (torch.arange(12) % 2).int().view(3, 2, 1, 2, 1),
            (torch.arange(12) % 3).bool().int().view(3, 2, 1, 2),
        ),
    ),
}


@pytest.mark.parametrize("backend", [None, "native_cpu", "sdpa_math", "sdpa_flash", "reference"])
@pytest.mark.parametrize("name", MAPPED)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_masks_with_arrays_that_are_mapped(name: str, backend: str | None) -> None:
    mask, arrays = MAPPED[name]
    q = torch.randn(3, 2, 6, 4, 16)

    def call(q: Tensor, *arrays: Tensor) -> Tensor:
        return attention(q, q, q, mask=mask(*arrays), backend=backend)

    got = vmap(call)(q, *arrays)
    want = [call(q[i], *[x[i] for x in arrays]) for i in range(3)]
    torch.testing.assert_close(got, torch.stack(want), atol=1e-5, rtol=1e-5)


def test_lengths_are_still_read_where_nothing_is_mapped() -> None:
    def loss(q: Tensor, lengths: Tensor) -> Tensor:
        return attention(q, q, q, mask=Padding(kv_lengths=lengths)).sum()

    with pytest.raises(InvalidProblem, match="from 3 to 9, expected 0 to 6"):
        grad(loss)(torch.randn(2, 6, 4, 16), torch.tensor([3, 9]))
