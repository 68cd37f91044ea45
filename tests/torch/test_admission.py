"""Wrong calls are clear errors: got, expected, what to do; never a crash, never a guess."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from polyattn import (
    Alibi,
    BlockMap,
    Causal,
    Chunked,
    Dense,
    DenseBias,
    InvalidProblem,
    LeftPadding,
    Packed,
    Padding,
    PrefixLM,
    Segments,
    UnknownBackend,
    Unsupported,
    Window,
)
from polyattn.selection.registry import Available, registry
from polyattn.torch import attention, explain, plan, scaled_dot_product_attention

Q = torch.randn(2, 8, 4, 16)
K = torch.randn(2, 8, 2, 16)


@pytest.mark.parametrize(
    "change",
    [
        {"query": Q[0]},
        {"query": Q.unsqueeze(0)},
        {"query": None},
        {"query": [1.0]},
        {"query": Q.double()},
        {"query": Q.to(torch.int64), "key": Q.to(torch.int64), "value": Q.to(torch.int64)},
        {
            "query": Q.to(torch.complex64),
            "key": K.to(torch.complex64),
            "value": K.to(torch.complex64),
        },
        {"query": Q.to("meta")},
        {"key": K[:1]},
        {"key": K[..., :8]},
        {"key": K[:, :5]},
        {"key": torch.randn(2, 8, 3, 16), "value": torch.randn(2, 8, 3, 16)},
        {"value": K[:, :, :1]},
        {"query": Q[..., :0], "key": K[..., :0], "value": K[..., :0]},
        {"query": Q.to_sparse()},
        {"layout": "NTBH"},
        {"layout": "packed"},
        {"layout": None},
        {"scale": "1"},
        {"deterministic": "x"},
        {"return_lse": "no"},
        {"return_lse": 2},
        {"scale": float("nan")},
        {"scale": torch.tensor(1.0)},
        {"softcap": 0},
        {"softcap": -1.0},
        {"softcap": float("inf")},
        {"dropout_p": 1.5},
        {"dropout_p": -0.1},
        {"dropout_p": None},
        {"mask": torch.ones(8, 8, dtype=torch.bool)},
        {"mask": "causal"},
        {"mask": Padding(kv_lengths=[9, 1])},
        {"mask": Padding(kv_lengths=[-1, 1])},
        {"mask": Padding(kv_lengths=torch.tensor([1, 9]))},
        {"mask": Padding(kv_lengths=[1])},
        {"mask": Padding(kv_lengths=[1, 2, 3])},
        {"mask": LeftPadding(q_starts=[9, 1])},
        {"mask": LeftPadding(kv_starts=torch.tensor([-1, 1]))},
        {"mask": ~LeftPadding(kv_starts=[1]) & Chunked(4)},
        {"mask": PrefixLM([9, 0])},
        {"mask": Segments([0] * 7)},
        {"mask": Segments(torch.zeros(3, 8, dtype=torch.int64))},
        {"mask": Dense(torch.ones(7, 8, dtype=torch.bool))},
        {"mask": Dense(torch.ones(3, 1, 8, 8, dtype=torch.bool))},
        {"mask": BlockMap(4, 4, [[[[0]]]], [[[1]]])},
        {"mask": BlockMap(4, 4, [[[[2], [0]]]], [[[1, 1]]])},
        {"mask": BlockMap(4, 4, [[[[-1], [0]]]], [[[1, 1]]])},
        {"mask": BlockMap(4, 4, [[[[0], [0]]]], [[[2, 1]]])},
        {"mask": Packed([0, 8])},
        {"bias": torch.zeros(8, 8)},
        {"bias": DenseBias(torch.zeros(7, 8))},
        {"bias": DenseBias(torch.zeros(8, 8, device="meta"))},
        {"bias": Alibi(torch.zeros(3))},
        {"sinks": torch.zeros(3)},
        {"sinks": torch.zeros(4, 0)},
        {"sinks": torch.zeros(4, dtype=torch.int64)},
        {"sinks": 1.0},
    ],
    ids=lambda change: " ".join(change),
)
def test_wrong_calls(change: dict[str, Any]) -> None:
    call = {"query": Q, "key": K, "value": K} | change
    with pytest.raises(InvalidProblem, match=r"(?s)got .*expected"):
        attention(**call)
    # and again, after right calls of the same options have filled the caches
    attention(Q, K, K)
    with pytest.raises(InvalidProblem):
        attention(**call)


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p"])
def test_what_equals_a_number_but_is_none_is_refused_after_it_too(name: str) -> None:
    number = 0.0 if name == "dropout_p" else 1.0
    for _ in range(2):
        with pytest.raises(InvalidProblem, match="of type bool, expected a Python number"):
            attention(Q, K, K, **{name: bool(number)})  # type: ignore[misc]
        attention(Q, K, K, **{name: number})  # type: ignore[misc]
        attention(Q, K, K, **{name: int(number)})  # type: ignore[misc]


@pytest.mark.parametrize("array", [np.float32(1.0), np.zeros((8, 8), np.float32)])
def test_a_bias_or_sinks_of_another_library_are_told_how_to_be_passed(array: Any) -> None:
    with pytest.raises(InvalidProblem, match=r"a DenseBias of type \w+, .*torch.as_tensor makes"):
        attention(Q, K, K, bias=DenseBias(array))
    with pytest.raises(InvalidProblem, match=r"sinks of type \w+, .*torch.as_tensor makes"):
        attention(Q, K, K, sinks=array)


def test_a_traced_scale_is_told_how_to_be_passed() -> None:
    def call(q: Any, scale: Any) -> Any:
        return attention(q, q, q, scale=scale)

    with pytest.raises(InvalidProblem, match="multiply the query"):
        torch.compile(call, backend="eager", fullgraph=True)(Q, torch.tensor(0.3))


@pytest.mark.parametrize("name", ["is_causal", "enable_gqa"])
def test_torchs_signature_takes_no_number_for_true(name: str) -> None:
    for _ in range(2):
        with pytest.raises(TypeError, match="must be bool, not int"):
            scaled_dot_product_attention(Q, Q, Q, **{name: 1})  # type: ignore[arg-type]
        scaled_dot_product_attention(Q, Q, Q, **{name: True})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "mask",
    [
        Packed([0, 3, 8]) | Causal(),
        Causal(),
        None,
        Packed([0, 3, 7]),
        Packed([1, 3, 8]),
        Packed([0, 5, 3, 8]),
        Packed([0, 3, 8]) & Dense(torch.ones(8, 8, dtype=torch.bool)),
        Packed([0, 3, 8]) & Padding(kv_lengths=[1]),
    ],
    ids=repr,
)
def test_wrong_packed_calls(mask: Any) -> None:
    q = torch.randn(8, 2, 16)
    with pytest.raises(InvalidProblem, match=r"(?s)got .*expected"):
        attention(q, q, q, mask=mask, layout="packed")


@pytest.mark.parametrize("bias", [Alibi(torch.ones(4)), DenseBias(torch.zeros(8, 8))])
def test_packed_calls_say_what_to_do_with_a_bias(bias: Any) -> None:
    rows = torch.randn(8, 4, 16)
    ends = [0, 3, 8]
    with pytest.raises(InvalidProblem, match=r"got bias=.* expected none; pass one row .*Segments"):
        attention(rows, rows, rows, mask=Packed(ends), bias=bias, layout="packed")
    row = rows.unsqueeze(0)
    documents = Segments.of_lengths([3, 5]) & Causal()
    found = attention(row, row, row, mask=documents, bias=bias)
    for first, last in pairwise(ends):
        part, size = row[:, first:last], last - first
        own = bias if isinstance(bias, Alibi) else DenseBias(bias.bias[:size, :size])
        alone = attention(part, part, part, mask=Causal(), bias=own)
        torch.testing.assert_close(found[:, first:last], alone)


def test_unknown_options_and_backends() -> None:
    with pytest.raises(TypeError, match="softcapp"):
        attention(Q, K, K, softcapp=1.0)
    for ask in (plan, explain):
        with pytest.raises(InvalidProblem, match="Did you mean 'softcap'"):
            ask(Q, K, K, softcapp=1.0)
    for name in ("sdpa_flsh", "", 3, None.__class__):
        with pytest.raises(UnknownBackend):
            attention(Q, K, K, backend=name)
    with pytest.raises(Unsupported, match=r"(?s)sdpa_cudnn.*These could: "):
        attention(Q, K, K, backend="sdpa_cudnn")


def test_masks_changed_in_place_are_read_anew_and_checked_anew() -> None:
    lengths = torch.tensor([8, 8])
    mask = Padding(kv_lengths=lengths)
    attention(Q, K, K, mask=mask)
    lengths[1] = 3
    got = attention(Q, K, K, mask=mask)
    torch.testing.assert_close(got[1:], attention(Q[1:], K[1:, :3], K[1:, :3]))
    lengths[1] = 9
    with pytest.raises(InvalidProblem, match="9"):
        attention(Q, K, K, mask=mask)


def test_layers_that_share_a_mask_are_right_at_any_sizes_and_after_writes() -> None:
    starts, lengths = torch.tensor([2, 0]), torch.tensor([8, 7])
    mask = Causal() & LeftPadding(kv_starts=starts) & Padding(kv_lengths=lengths)
    step = Q[:, -1:]

    def expected() -> torch.Tensor:
        rows = []
        for b in range(2):
            own = slice(int(starts[b]), int(lengths[b]))
            rows.append(attention(step[b : b + 1], K[b : b + 1, own], K[b : b + 1, own]))
        return torch.cat(rows)

    longer = torch.cat([K, K], 1)
    for keys in (K, K, longer, longer, K):
        torch.testing.assert_close(attention(step, keys, keys, mask=mask), expected())
    starts.fill_(3)
    torch.testing.assert_close(attention(step, K, K, mask=mask), expected())
    with torch.inference_mode():  # whose tensors count no writes
        free = Padding(kv_lengths=torch.tensor([8, 8]))
        first = attention(step, K, K, mask=free)
        free.kv_lengths.fill_(4)
        assert not torch.equal(attention(step, K, K, mask=free), first)


def test_lengths_written_behind_torchs_back_are_read_and_checked_anew() -> None:
    lengths = torch.tensor([8, 8])
    mask = Padding(kv_lengths=lengths)
    attention(Q, K, K, mask=mask)
    lengths.numpy()[1] = 3
    got = attention(Q, K, K, mask=mask)
    torch.testing.assert_close(got[1:], attention(Q[1:], K[1:, :3], K[1:, :3]))
    lengths.numpy()[:] = 1000
    with pytest.raises(InvalidProblem, match="1000"):
        attention(Q, K, K, mask=mask)


def test_empty_calls() -> None:
    for shape_q, shape_k in (
        ((0, 4), (0, 4)),
        ((2, 0), (2, 4)),
        ((2, 4), (2, 0)),
        ((0, 0), (0, 0)),
    ):
        q = torch.randn(*shape_q, 4, 16, requires_grad=True)
        k = torch.randn(*shape_k, 2, 16, requires_grad=True)
        v = torch.randn(*shape_k, 2, 8, requires_grad=True)
        out, lse = attention(q, k, v, return_lse=True, mask=Causal())
        assert out.shape == (*shape_q, 4, 8) and lse.shape == (shape_q[0], 4, shape_q[1])
        assert (out == 0).all() and (lse == float("-inf")).all()
        for grad in torch.autograd.grad(out.sum(), (q, k, v)):
            assert (grad == 0).all()


def test_sinks_of_rows_without_keys() -> None:
    sinks = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    q, k = torch.randn(1, 3, 2, 4), torch.randn(1, 0, 2, 4)
    out, lse = attention(q, k, k, sinks=sinks, return_lse=True)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sinks.logsumexp(-1).view(1, 2, 1).expand(1, 2, 3))
    k = torch.randn(1, 5, 2, 4)
    out, lse = attention(q, k, k, sinks=sinks, return_lse=True, mask=Padding(kv_lengths=[0]))
    assert (out == 0).all()
    torch.testing.assert_close(lse, sinks.logsumexp(-1).view(1, 2, 1).expand(1, 2, 3))


def test_plan_is_the_bare_kernel_and_says_what_it_is() -> None:
    step = plan(Q, K, K, mask=Causal())
    torch.testing.assert_close(step(Q, K, K), attention(Q, K, K, mask=Causal()))
    assert step.selection.backend == explain(Q, K, K, mask=Causal()).backend
    lengths = torch.tensor([3, 8])
    step = plan(Q, K, K, mask=Padding(kv_lengths=lengths), backend="sdpa_math", return_lse=False)
    torch.testing.assert_close(step(Q, K, K), attention(Q, K, K, mask=Padding(kv_lengths=lengths)))
    assert step.selection.backend == "sdpa_math"


@pytest.mark.parametrize("backend", ["sdpa_flash", "native_cpu"])
@pytest.mark.parametrize("mask", [None, Causal()], ids=str)
def test_plans_of_calls_that_the_extension_makes_by_itself(backend: str, mask: Any) -> None:
    for trains in (False, True):
        q = torch.randn(1, 6, 2, 8, requires_grad=trains)
        step = plan(q, q, q, mask=mask, backend=backend)
        out = attention(q, q, q, mask=mask, backend=backend)
        assert torch.equal(step(q, q, q), out) and step.selection.backend == backend
        assert step(q, q, q).requires_grad is trains


def test_a_second_plan_does_not_change_what_the_first_says() -> None:
    first = plan(Q, Q, Q, backend="sdpa_math")
    second = plan(Q, Q, Q, backend="sdpa_flash")
    assert (first.selection.backend, second.selection.backend) == ("sdpa_math", "sdpa_flash")


FAKED = [
    name
    for name in registry.names("torch")
    if "cpu" in registry["torch", name].capabilities_for("cpu").devices
    and isinstance(registry.probe(("torch", name)), Available)
]


def test_fake_tensors_leave_nothing_behind_and_find_nothing_real() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mask = Causal() & Window(left=2)
    for _ in range(2):
        with FakeTensorMode():
            q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 9, 2, 8)
            for name in FAKED:
                assert attention(q, k, k, mask=mask, backend=name).shape == q.shape
        q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 9, 2, 8)
        expected = attention(q, k, k, mask=mask, backend="reference")
        for name in FAKED:
            torch.testing.assert_close(attention(q, k, k, mask=mask, backend=name), expected)


def test_explain_takes_meta_tensors_and_runs_nothing() -> None:
    q = torch.empty(2, 1 << 20, 8, 64, device="meta", dtype=torch.bfloat16)
    found = explain(q, q, q, mask=Causal())
    assert found.backend in ("native_cpu", "sdpa_flash") and "reference" in str(found)
