"""Jagged nested tensors: packed rows by another name, in every way into attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from polyattn import (
    Causal,
    Dense,
    InvalidProblem,
    Packed,
    Unsupported,
    Window,
    record_selections,
    use_backend,
)
from polyattn.integrations.sdpa_patch import route_sdpa
from polyattn.torch import attention, explain
from polyattn.torch import scaled_dot_product_attention as sdpa

LENGTHS, OTHERS = (30, 1, 71, 17), (5, 40, 71, 2)


def jagged(lengths: tuple[int, ...] = LENGTHS, heads: int = 4, dim: int = 16, **made: Any) -> Any:
    rows = [torch.randn(length, heads, dim, **made) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def alike(x: Any, heads: int = 4, dim: int = 16) -> Any:
    values = torch.randn(x.values().shape[0], heads, dim)
    return torch.nested.nested_tensor_from_jagged(values, offsets=x.offsets())


def one_by_one(q: Any, k: Any, v: Any, **options: Any) -> list[Any]:
    """Each sequence by itself, as a batch of one; (T, N, H) each."""
    found = []
    for one in zip(q.unbind(), k.unbind(), v.unbind(), strict=True):
        found.append(attention(*(x.unsqueeze(0) for x in one), **options))
    return found


@pytest.mark.parametrize(
    "mask", [None, Causal(), Causal("top_left"), Causal() & Window(9)], ids=str
)
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("backend", [None, "reference", "sdpa_math"])
def test_each_sequence_is_attended_by_itself(backend: Any, layout: str, mask: Any) -> None:
    q = jagged(heads=4)
    k, v = alike(q, 2), alike(q, 2, 24)
    want = one_by_one(q, k, v, mask=mask)
    given = (q, k, v) if layout == "BTNH" else tuple(x.transpose(1, 2) for x in (q, k, v))
    with record_selections() as ran:
        out = attention(*given, mask=mask, layout=layout, backend=backend)
    assert ran[0].problem is not None and ran[0].problem.layout == "packed"
    assert out.layout == torch.jagged and out.offsets() is q.offsets()
    out = out if layout == "BTNH" else out.transpose(1, 2)
    assert out.shape[1] == q.shape[1] and out.shape[3] == 24
    for got, expected in zip(out.unbind(), want, strict=True):
        torch.testing.assert_close(got, expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_queries_of_other_lengths_and_lse(layout: str) -> None:
    q, k = jagged(OTHERS), jagged()
    v = alike(k)
    want = one_by_one(q, k, v, mask=Causal(), return_lse=True)
    given = (q, k, v) if layout == "BTNH" else tuple(x.transpose(1, 2) for x in (q, k, v))
    out, lse = attention(*given, mask=Causal(), layout=layout, return_lse=True)
    out = out if layout == "BTNH" else out.transpose(1, 2)
    assert lse.shape[:2] == (4, 4) and lse.offsets() is q.offsets()
    for got, sums, expected in zip(out.unbind(), lse.unbind(), want, strict=True):
        torch.testing.assert_close(got, expected[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sums, expected[1][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_gradients(layout: str, compiled: bool) -> None:
    offsets = jagged().offsets()
    total = int(offsets[-1])
    leaves = [torch.randn(total, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.randn(4, requires_grad=True)
    weight = torch.randn(total, 4, 16)

    def loss(*leaves: Any) -> Any:
        made = [torch.nested.nested_tensor_from_jagged(x, offsets=offsets) for x in leaves]
        if layout == "BNTH":
            made = [x.transpose(1, 2) for x in made]
        out = attention(*made, mask=Causal(), sinks=sinks, layout=layout)
        values = out.values() if layout == "BTNH" else out.values().transpose(0, 1)
        return (values * weight).sum()

    def dense(*leaves: Any) -> Any:
        mask = Packed(offsets) & Causal()
        return (attention(*leaves, mask=mask, sinks=sinks, layout="packed") * weight).sum()

    want = torch.autograd.grad(dense(*leaves), [*leaves, sinks])
    if compiled:
        torch._dynamo.reset()
        loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(loss(*leaves), [*leaves, sinks])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_compiled_for_other_lengths() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, mask=Causal()), fullgraph=True, backend="aot_eager"
    )
    for lengths in (LENGTHS, (300, 5), (8, 8, 8)):
        q = jagged(lengths)
        k, v = alike(q), alike(q)
        got, want = compiled(q, k, v), attention(q, k, v, mask=Causal())
        assert got.shape == want.shape == q.shape
        torch.testing.assert_close(got.values(), want.values(), rtol=1e-5, atol=1e-5)


def test_the_lengths_it_remembers_are_handed_on() -> None:
    offsets = jagged().offsets()
    values = torch.randn(int(offsets[-1]), 4, 16)
    q = torch.nested.nested_tensor_from_jagged(values, offsets=offsets, min_seqlen=1, max_seqlen=71)
    out: Any = attention(q, q, q)
    assert (out._maybe_min_seqlen, out._maybe_max_seqlen) == (1, 71)
    plain = torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
    again: Any = attention(plain, plain, plain)
    assert again._maybe_max_seqlen is None


def test_autocast_and_requests_and_explanations() -> None:
    q = jagged()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, q, q).dtype == torch.bfloat16
    assert (
        explain(q, q, q, mask=Causal()).backend
        == explain(
            q.values(), q.values(), q.values(), mask=Packed(q.offsets()) & Causal(), layout="packed"
        ).backend
    )
    with use_backend("sdpa_math"), record_selections() as ran:
        attention(q, q, q)
    assert [choice.backend for choice in ran] == ["sdpa_math"]
    with pytest.raises(Unsupported):
        attention(q, q, q, backend="sdpa_math", return_lse=True)


def test_empty_sequences_and_no_sequences() -> None:
    values = torch.randn(5, 4, 16)
    q = torch.nested.nested_tensor_from_jagged(values, offsets=torch.tensor([0, 0, 5, 5]))
    out: Any = attention(q, q, q, mask=Causal())
    torch.testing.assert_close(
        out.values(), attention(*[values[None]] * 3, mask=Causal())[0], rtol=1e-5, atol=1e-5
    )
    none = torch.nested.nested_tensor_from_jagged(values[:0], offsets=torch.tensor([0, 0]))
    assert attention(none, none, none).values().shape == (0, 4, 16)


X = jagged()
DENSE = torch.randn(4, 71, 4, 16)
STRIDED = torch.nested.nested_tensor([torch.randn(2, 4, 16), torch.randn(3, 4, 16)])
GAPS = torch.nested.narrow(
    torch.randn(4, 71, 4, 16), 1, torch.zeros(4).long(), torch.tensor(LENGTHS), layout=torch.jagged
)
WRONG = {
    "dense key": ((X, DENSE, X), {}, r"got a dense key beside a nested tensor.*nested_tensor_from"),
    "dense query": ((DENSE, X, X), {}, "got a dense query beside a nested tensor"),
    "no tensor": ((X, X, 3), {}, "value of type int beside"),
    "strided": ((STRIDED, STRIDED, STRIDED), {}, r"expected torch\.jagged: .*as_nested_tensor"),
    "other layout": ((X, X, X), {"layout": "BNTH"}, r"dim 1 varies, expected \(B, N, j, H\)"),
    "packed": ((X, X, X), {"layout": "packed"}, "they say themselves how"),
    "three dims": ((jagged(dim=1).flatten(2),) * 3, {}, "of 3 dims"),
    "gaps": ((GAPS, GAPS, GAPS), {}, r"pass query\.contiguous\(\)"),
    "batch": ((X, jagged((3, 4)), jagged((3, 4))), {}, "4 sequences of queries and 2 of keys"),
    "value": ((X, X, jagged(OTHERS)), {}, r"of other lengths, expected the same.*key\.offsets"),
    "mask": ((X, X, X), {"mask": Packed(X.offsets())}, "expected a mask without Packed"),
    "raw mask": ((X, X, X), {"mask": DENSE}, r"got mask of type Tensor, expected a Mask"),
    "dense mask": ((X, X, X), {"mask": Dense(torch.ones(4, 1, 1, 71).bool())}, "packed problem"),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_mixtures_are_clear_errors(name: str, compiled: bool) -> None:
    arrays, options, text = WRONG[name]
    call: Any = lambda *arrays: attention(*arrays, **options)  # noqa: E731
    if compiled:
        if name in ("strided", "gaps"):
            pytest.skip("torch's compiler does not take such a tensor in")
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="eager")
    with pytest.raises(InvalidProblem, match=text):
        call(*arrays)


def test_values_of_the_same_lengths_from_other_offsets() -> None:
    q, k = jagged(), jagged()
    v = jagged()
    out = attention(q, k, v)
    for got, want in zip(out.unbind(), one_by_one(q, k, v), strict=True):
        torch.testing.assert_close(got, want[0], rtol=1e-5, atol=1e-5)


# --- torch's own signature ---


class Heard:
    def __init__(self) -> None:
        self.backends: list[str] = []
        self.reasons: list[str] = []

    def ran(self, selection: Any, call: Any) -> None:
        self.backends.append(selection.backend)

    def passed(self, reason: str, call: Any) -> None:
        self.reasons.append(reason)


def turned(*tensors: Any) -> list[Any]:
    return [x.transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}], ids=str)
def test_the_drop_in_computes_what_torch_does(options: Any) -> None:
    q, k = jagged(OTHERS), jagged()
    for given in (turned(q, alike(q), alike(q)), turned(q, k, alike(k))):
        theirs = F.scaled_dot_product_attention(*given, **options)
        with record_selections() as ran:
            ours = sdpa(*given, **options)
        heard = Heard()
        with route_sdpa(heard):
            routed = F.scaled_dot_product_attention(*given, **options)
        assert "torch" not in [choice.backend for choice in ran] and not heard.reasons
        for out in (ours, routed):
            assert out.shape == theirs.shape and out.offsets() is given[0].offsets()
            torch.testing.assert_close(out.values(), theirs.values(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_causal_and_gradients_through_the_drop_in(compiled: bool) -> None:
    offsets = jagged().offsets()
    leaf = torch.randn(int(offsets[-1]), 4, 16, requires_grad=True)

    def loss(leaf: Any) -> Any:
        x = torch.nested.nested_tensor_from_jagged(leaf, offsets=offsets).transpose(1, 2)
        return sdpa(x, x, x, is_causal=True).values().square().sum()

    def dense(leaf: Any) -> Any:
        total = torch.zeros(())
        for x in leaf.split(offsets.diff().tolist()):
            x = x.transpose(0, 1)[None]
            total = total + F.scaled_dot_product_attention(x, x, x, is_causal=True).square().sum()
        return total

    want = torch.autograd.grad(dense(leaf), leaf)
    if compiled:
        torch._dynamo.reset()
        loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(loss(leaf), leaf), want, rtol=1e-4, atol=1e-5)


def test_what_is_left_to_torch_is_said() -> None:
    q = jagged()
    heard = Heard()
    (x,) = turned(q)
    with route_sdpa(heard):
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        F.scaled_dot_product_attention(q, q, q)  # ragged batches: attention over the heads
        with pytest.raises(ValueError, match="Expected query, key, and value to be nested"):
            F.scaled_dot_product_attention(x, DENSE.transpose(1, 2), x)
    assert heard.backends == ["sdpa_flash"]  # torch's own call on what lies in the ragged batches
    assert heard.reasons == [
        "jagged tensors with an attn_mask or dropout",
        "jagged tensors that are not (B, N, j, H) without gaps",
        "a tensor of type Tensor beside a nested one",
    ]
    with use_backend("native_cpu"), pytest.raises(Unsupported, match="jagged tensors with"):
        sdpa(x, x, x, dropout_p=0.1)
