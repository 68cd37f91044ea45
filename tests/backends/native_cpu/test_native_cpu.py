"""The native CPU kernels on tensors: gradients, strides, threads, and what surrounds a call."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from polyattn import record_selections, use_backend
from polyattn.errors import Unsupported
from polyattn.masks import BlockMap, Causal, Dense, Packed, Padding, PrefixLM, Segments, Window
from polyattn.masks.biases import Alibi, DenseBias
from polyattn.native import module
from polyattn.selection.registry import Available
from polyattn.torch import attention, explain

pytestmark = pytest.mark.skipif(
    not isinstance(module.status(), Available), reason="the extension is not built"
)
TINY = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def native(*args: Any, **options: Any) -> Any:
    return attention(*args, backend="native_cpu", **options)


def exact(*args: Any, **options: Any) -> Any:
    return attention(*args, backend="reference", **options)


def arrays(b=2, t=70, s=99, n=4, k=2, h=24, v=16, dtype=torch.float32, grad=False):
    generator = torch.Generator().manual_seed(t * s + n)
    shapes = (b, t, n, h), (b, s, k, h), (b, s, k, v)
    every = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in every]


def masks(t=70, s=99):
    generator = torch.Generator().manual_seed(5)
    bits = torch.rand((2, 1, t, s), generator=generator) > 0.5
    indices = torch.rand((1, 4, 5, 4), generator=generator).argsort(-1)
    return {
        "none": None,
        "causal": Causal(),
        "window": Causal("top_left") & Window(left=9),
        "padding": Padding([t, 3], torch.tensor([0, s - 1], dtype=torch.int32)) & Causal(),
        "segments": Segments(torch.arange(t) // 30, torch.arange(2 * s).reshape(2, s) // 40),
        "prefix": PrefixLM(torch.tensor([40, 0])),
        "blocks": BlockMap(16, 32, indices, torch.tensor([[[1, 4, 0, 2, 3]]]).expand(1, 4, 5)),
        "dense": Dense(bits) | Window(left=2, right=0),
    }


def compare(make, dtype=torch.float32):
    """Compare out, lse and gradients of ``make(attend) -> (results, leaves)``."""
    found = []
    for attend in (native, exact):
        results, leaves = make(attend)
        generator = torch.Generator().manual_seed(1)
        heads = [torch.randn(x.shape, generator=generator).to(x) for x in results]
        grads = torch.autograd.grad(results, leaves, heads) if leaves else ()
        found.append((*results, *grads))
    for got, wanted in zip(*found, strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(
            got.double(), wanted.double(), rtol=TINY[dtype], atol=TINY[dtype]
        )


@pytest.mark.parametrize("dtype", TINY, ids=str)
@pytest.mark.parametrize("kind", masks())
def test_masks_with_gradients(kind: str, dtype: torch.dtype) -> None:
    leaves = arrays(dtype=dtype, grad=True)
    mask = masks()[kind]
    compare(lambda attend: (attend(*leaves, mask=mask, return_lse=True), leaves), dtype)


@pytest.mark.parametrize(
    "shape", [(2, 4, 70, 99), (70, 99), (4, 1, 99), (2, 1, 70, 1), (99,), (1, 1), ()], ids=str
)
def test_biases_of_every_shape_with_gradients(shape: tuple[int, ...]) -> None:
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()
    leaves = [*arrays(grad=True), bias]
    compare(lambda attend: ([attend(*leaves[:3], bias=DenseBias(bias), mask=Causal())], leaves))


def test_an_expanded_bias_has_a_gradient_for_each_entry() -> None:
    column = torch.randn(4, 1, 99).requires_grad_()
    compare(
        lambda attend: ([attend(*arrays(), bias=DenseBias(column.expand(4, 70, 99)))], [column])
    )


def test_float64_biases_beyond_float32_hide_nothing() -> None:
    least = torch.finfo(torch.float64).min
    bias = torch.full((1, 1, 70, 99), least, dtype=torch.float64)
    bias[..., 3:5] = -torch.inf
    bias[..., 10, 7] = 0.0
    q, k, v = arrays()
    expected = exact(q, k, v, bias=DenseBias(bias))
    torch.testing.assert_close(native(q, k, v, bias=DenseBias(bias)), expected)


@pytest.mark.parametrize("shape", [(4,), (4, 3)], ids=str)
def test_sinks_softcap_and_lse_with_gradients(shape: tuple[int, ...]) -> None:
    sinks = torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()
    leaves = [*arrays(grad=True), sinks]
    options = {"mask": masks()["padding"], "softcap": 3.0, "return_lse": True, "scale": 0.4}
    compare(lambda attend: (attend(*leaves[:3], sinks=sinks, **options), leaves))


def test_lse_alone_has_gradients() -> None:
    leaves = arrays(grad=True)
    compare(lambda attend: ([attend(*leaves, mask=Causal(), return_lse=True)[1]], leaves[:2]))


def test_wide_sinks_beside_half_inputs_have_all_their_digits() -> None:
    leaves = arrays(dtype=torch.bfloat16)
    sinks = torch.randn(4).requires_grad_()
    bias = torch.randn(70, 99).requires_grad_()
    heads = torch.randn(2, 70, 4, 16).bfloat16()

    def grads(*inputs: torch.Tensor, backend: str) -> tuple[torch.Tensor, ...]:
        out = attention(*inputs, sinks=sinks, bias=DenseBias(bias), backend=backend)
        return torch.autograd.grad(out, (sinks, bias), heads.to(out))

    truth = grads(*(x.double() for x in leaves), backend="reference")
    for got, wanted in zip(grads(*leaves, backend="native_cpu"), truth, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_alibi_and_its_packed_groups() -> None:
    leaves = arrays(grad=True)
    slopes = torch.tensor([[0.5, 0.1, 0.2, 0.3], [1, 0.01, 0.03, 0]], dtype=torch.bfloat16)
    compare(lambda attend: ([attend(*leaves, bias=Alibi(slopes))], leaves))


def test_packed_sequences_with_gradients() -> None:
    q, k, v = (x[0].detach().requires_grad_() for x in arrays())
    mask = Packed([0, 0, 33, 70], torch.tensor([0, 20, 21, 99])) & Causal()
    ids = Segments(torch.arange(70) // 7, torch.arange(99) // 9)
    for joined in (mask, mask & Padding(None, [9, 1, 50]), mask & ids):
        compare(
            lambda attend, joined=joined: (
                attend(q, k, v, mask=joined, layout="packed", return_lse=True),
                (q, k, v),
            )
        )


def test_masks_without_a_program_are_made_dense() -> None:
    q, k, v = (x[0].detach().requires_grad_() for x in arrays())
    ids = Segments(torch.arange(140).reshape(2, 70) // 7, torch.arange(198).reshape(2, 99) // 9)
    packed = Packed([0, 33, 70], [0, 20, 99]) & ids
    compare(lambda attend: (attend(q, k, v, mask=packed, layout="packed", return_lse=True), (q,)))
    wide: Any = Causal()
    for i in range(12):
        wide = wide & (Dense(torch.arange(99) % 13 != i) | Padding([i, 70], [90, i + 1]))
    compare(lambda attend: ([attend(*arrays(), mask=wide)], ()))


@pytest.mark.parametrize("limit", [None, [70, 99]], ids=["no-arrays", "lengths"])
def test_short_masks_without_a_program_are_made_dense(limit: list[int] | None) -> None:
    """Such calls have a way that holds only the codes of a mask: these take the longer one."""
    mask: Any = Window(left=0, right=0)
    for i in range(1, 20):
        mask = mask | Window(left=2 * i, right=40 - i)
    mask = mask if limit is None else mask & Padding(None, torch.tensor(limit))
    for _ in range(3):
        compare(lambda attend: ([attend(*arrays(), mask=mask)], ()))


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_every_stride(layout: str) -> None:
    q, k, v = arrays()
    if layout == "BNTH":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    wanted = exact(q, k, v, layout=layout)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    strided = [x.repeat_interleave(2, -1)[..., ::2] for x in (q, k, v)]
    negated = [torch._neg_view(-x) for x in (q, k, v)]
    for inputs in ((q, k, v), turned, strided, negated):
        torch.testing.assert_close(native(*inputs, layout=layout), wanted, rtol=1e-5, atol=1e-5)
    shared = [x[:1].expand(3, -1, -1, -1) for x in (q, k, v)]
    torch.testing.assert_close(
        native(*shared, layout=layout), wanted[:1].expand(3, -1, -1, -1), rtol=1e-5, atol=1e-5
    )


def test_heads_viewed_second_come_back_as_they_lay() -> None:
    inputs = [x.transpose(1, 2) for x in arrays(v=24)]
    for grad in (False, True):
        out = native(*(x.requires_grad_(grad) for x in inputs), layout="BNTH")
        assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    def region(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with use_backend("native_cpu"):
            return attention(q, k, v, mask=Causal()).square()

    leaves = arrays(grad=True)
    wanted = torch.autograd.grad(region(*leaves).sum(), leaves)
    again = [x.detach().requires_grad_() for x in leaves]
    with record_selections() as ran:
        checkpoint(region, *again, use_reentrant=reentrant).sum().backward()
    assert [selection.backend for selection in ran] == ["native_cpu"] * 2
    for leaf, grad in zip(again, wanted, strict=True):
        assert torch.equal(leaf.grad, grad)


def test_only_what_needs_a_gradient_gets_one() -> None:
    q, k, v = arrays()
    k.requires_grad_()
    native(q, k, v).sum().backward()
    assert q.grad is None and v.grad is None and k.grad.shape == k.shape


def test_what_is_masked_never_leaks() -> None:
    q, k, v = arrays(grad=True)
    mask = Causal() & Padding([60, 70], [99, 50])
    clean = native(q, k, v, mask=mask, return_lse=True)
    with torch.no_grad():
        for x in (k, v):
            x[1, 50:] = float("nan")
        q[0, 60:] = float("nan")
        v[0, 98] = float("inf")  # no query but the last may see it, and that one is padded
    struck = native(q, k, v, mask=mask, return_lse=True)
    for a, b in zip(clean, struck, strict=True):
        assert torch.equal(a, b)
    for grad in torch.autograd.grad(struck[0].sum() + struck[1].exp().sum(), (q, k, v)):
        assert grad.isfinite().all()


def test_a_nan_reaches_who_attends_to_it() -> None:
    q, k, v = arrays(s=70)
    k[0, 30, 0, 0] = float("nan")
    out = native(q, k, v, mask=Causal())
    struck = out.isnan().any(-1)
    assert not struck[1].any() and not struck[0, :30].any() and not struck[0, :, 2:].any()
    assert struck[0, 30:, :2].all()


def test_inputs_stay_and_results_repeat_on_any_threads() -> None:
    leaves = arrays(grad=True)
    before, kept = torch.get_num_threads(), [x.detach().clone() for x in leaves]
    found = []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            out = native(*leaves, mask=Causal())
            found.append((out, *torch.autograd.grad(out.sum(), leaves)))
    finally:
        torch.set_num_threads(before)
    for one, other in zip(found[1], found[2], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(found[0], found[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, leaves, kept))


def test_many_python_threads_at_once() -> None:
    inputs = [arrays(t=t) for t in (1, 33, 70, 128)]
    wanted = [native(*each, mask=Causal()) for each in inputs]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(30):
            out = native(*inputs[number], mask=Causal())
            if not torch.equal(out, wanted[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("changes", "options", "about"),
    [
        ({"dtype": torch.float64}, {}, "dtype"),
        ({}, {"dropout_p": 0.5}, "dropout"),
        ({}, {"scale": -3e38}, "scale: got scale=-3e.38, takes scales up to 1.7e.38"),
        ({}, {"softcap": 1e-46}, "soft cap: got softcap=1e-46, takes caps from 1.18e-38 on"),
        ({"h": 1025, "t": 1, "s": 1}, {}, "head dim"),
        ({}, {"bias": Alibi(torch.rand(4).requires_grad_())}, "bias gradient"),
        ({}, {"bias": DenseBias(torch.rand(99).double().requires_grad_())}, "bias gradient"),
    ],
)
def test_refusals(changes: dict[str, Any], options: dict[str, Any], about: str) -> None:
    with pytest.raises(Unsupported, match=about):
        native(*arrays(**changes), **options)


def test_forced_instruction_sets_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyattn.errors import SettingsError

    monkeypatch.setenv("POLYATTN_NATIVE_ISA", "neon" if "neon" not in module.isas() else "avx2")
    with pytest.raises(SettingsError, match="POLYATTN_NATIVE_ISA"):
        native(*arrays(t=5, n=8))


def test_preferred_where_there_is_work_and_passed_over_where_it_cannot() -> None:
    def chosen(size: int, **options: Any) -> str:
        q = torch.empty(1, size, 8, 64, device="meta", dtype=options.pop("dtype", torch.bfloat16))
        return explain(q, q, q, **options).backend

    assert chosen(1024, mask=Causal()) == chosen(1024, softcap=5.0) == "native_cpu"
    assert chosen(8, softcap=5.0) == "native_cpu"
    assert chosen(1024, dtype=torch.float64) == "sdpa_flash"
    assert chosen(1024, dropout_p=0.5) == "sdpa_math"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 130, 300), (2, 1, 1, 300), (2, 4, 130, 300), (130, 300)])
def test_a_bias_that_is_a_mask_is_taken_for_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Numbers of 0 and -inf say what booleans say, and one other number makes them a bias."""
    q = torch.randn(2, 4, 130, 16, dtype=dtype)
    k, v = torch.randn(2, 2, 4, 300, 16, dtype=dtype)
    seen = torch.rand(shape) < 0.3
    numbers = torch.where(seen, 0.0, -math.inf).to(dtype)
    numbers[..., ::7] *= -1 if not seen[..., ::7].any() else 1
    got = attention(q, k, v, bias=DenseBias(numbers), layout="BNTH", backend="native_cpu")
    options: dict[str, Any]
    by_mask = attention(q, k, v, mask=Dense(seen), layout="BNTH", backend="native_cpu")
    assert torch.equal(got, by_mask)
    poisoned = [x.clone() for x in (q, k, v)]
    for x in poisoned:  # goes past numbers, as in torch's own, and not past a mask
        x[0, 0, 3, 2] = math.nan
        numbers = torch.where(seen, 0.0, -math.inf).to(dtype)
        options = {"bias": DenseBias(numbers), "layout": "BNTH"}
        inputs = [
            x if x.shape == y.shape and (x[0, 0, :3] == y[0, 0, :3]).all() else y for y in (q, k, v)
        ]
        got = attention(*inputs, **options, backend="native_cpu")
        want = attention(*inputs, **options, backend="reference")
        assert torch.equal(got.isnan(), want.isnan()) and want.isnan().any()
    for other in (0.5, -1e4, math.nan):
        numbers = torch.where(seen, 0.0, -math.inf).to(dtype)
        numbers[..., -1, 5] = other
        options = {"bias": DenseBias(numbers), "layout": "BNTH"}
        got = attention(q, k, v, **options, backend="native_cpu")
        want = attention(q, k, v, **options, backend="reference")
        assert torch.allclose(got, want, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("isa", module.isas() if isinstance(module.status(), Available) else [])
@pytest.mark.parametrize("rows", [1, 6, 8])
def test_few_rows_keep_their_bits_beside_a_nan(
    monkeypatch: pytest.MonkeyPatch, isa: str, rows: int
) -> None:
    """Whatever the products of a set are of: rows that do not attend a key are summed as before."""
    monkeypatch.setenv("POLYATTN_NATIVE_ISA", isa)
    keys, dim = 37, 40
    for seed in range(24):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(2, 2, n, dim).bfloat16() for n in (rows, keys, keys))

        def out(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor = q) -> torch.Tensor:
            return attention(q, k, v, mask=Causal(), layout="BNTH", backend="native_cpu")

        clean, (bad_k, bad_v) = out(k, v), (x.clone() for x in (k, v))
        bad_k[:, :, -2] = bad_v[:, :, -3] = float("nan")
        for struck in (out(bad_k, v), out(k, bad_v)):
            assert torch.equal(struck[:, :, : rows - 3], clean[:, :, : rows - 3])
            assert bool(struck[:, :, -1].isnan().any())
