"""Padded batches by FlashAttention 2 for CUDA, by a stand-in that computes what CUDA's does.

The kernel runs on CUDA alone (tests/torch/test_cuda.py); the lowering in front of it runs anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from polyattn import Causal, LeftPadding, Padding
from polyattn.backends.sdpa.torch import load_flash, ranges
from polyattn.backends.sdpa.torch.sequence_marks import Side, marks
from polyattn.masks import Mask
from polyattn.registry import registry
from polyattn.torch import attention
from polyattn.torch.admission import admit


def stand_in(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int,
    dropout: float, causal: bool, debug: bool, *, scale: float | None,
    seqused_k: Tensor | None = None,
) -> Any:  # fmt: skip
    """FlashAttention 2 over sequences behind one another: (rows, N, H), lse (N, rows).

    Of `seqused_k` keys from where each sequence's begin. Keys and queries of no pair are not read.
    """
    assert cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.shape == cu_k.shape
    assert seqused_k is None or (seqused_k.dtype == torch.int32 and not v.requires_grad)
    groups, rows = q.shape[1] // k.shape[1], len(cu_q) - 1
    if longest_q == 1 and groups > 1:  # where it makes rows of heads: one query to each sequence
        assert q.shape[0] == rows and torch.equal(cu_q, torch.arange(rows + 1, dtype=torch.int32))
    nothing = q[:0].sum() + k[:0].sum() + v[:0].sum()  # has gradients, of all
    outs, sums = [nothing.expand(0, *q.shape[1:])], [nothing.expand(q.shape[1], 0)]
    for i, (a, b) in enumerate(zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True)):
        first = int(cu_k[i])
        length = int(cu_k[i + 1]) - first if seqused_k is None else int(seqused_k[i])
        assert 0 <= b - a <= longest_q
        if a == b:
            continue
        assert 0 <= length <= longest_k
        if length == 0:
            outs.append(torch.zeros(b - a, *q.shape[1:]))
            sums.append(torch.full((q.shape[1], b - a), math.inf))
            continue
        keys, values = (x[first : first + length].repeat_interleave(groups, 1) for x in (k, v))
        scores = torch.einsum("tnh,snh->nts", q[a:b], keys) * (scale or 1 / math.sqrt(q.shape[-1]))
        if causal:
            place = torch.arange(b - a)[:, None] + length - (b - a)
            assert length >= b - a
            scores = scores.masked_fill(torch.arange(length) > place, -math.inf)
        outs.append(torch.einsum("nts,snh->tnh", scores.softmax(-1), values))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1), None, None, None


ENDS, FIRSTS = [0, 1, 9, 12, 16, 13], [5, 0, 3, 12, 16, 2]


def lengths(values: list[int], dtype: Any = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def masks() -> Iterator[tuple[str, Mask]]:
    ends, firsts, other = lengths(ENDS), lengths(FIRSTS, torch.int64), lengths(ENDS[::-1])
    far = lengths([-3, 99, 4, 16, 0, 7], torch.int64)  # nobody has read them on a device
    yield "keys", Padding(kv_lengths=ends)
    yield "far", Padding(kv_lengths=far)
    yield "queries", Padding(q_lengths=ends)
    yield "both", Padding(ends, other)
    yield "alike", Padding(ends, ends)
    yield "left", LeftPadding(kv_starts=firsts)
    yield "left far", LeftPadding(kv_starts=far)
    yield "left both", LeftPadding(firsts, firsts)
    yield "left and right", LeftPadding(kv_starts=firsts) & Padding(kv_lengths=ends)
    yield "all", LeftPadding(firsts, lengths(FIRSTS[::-1])) & Padding(other, ends)
    yield "twice", Padding(kv_lengths=ends) & Padding(kv_lengths=other)


MASKS = dict(masks())


def arrays(layout: str, rows: int, kv_heads: int, spaced: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    drawn = []
    for length, heads in ((rows, 4), (16, kv_heads), (16, kv_heads)):
        room = length + 5 if spaced else length  # a cache has room for more than is asked about
        if layout == "BTNH":
            drawn.append(torch.randn(6, room, heads, 16, generator=generator)[:, :length])
        else:
            drawn.append(torch.randn(6, heads, room, 16, generator=generator)[:, :, :length])
    return drawn


def run(q: Tensor, k: Tensor, v: Tensor, mask: Mask, layout: str, lse: bool = True) -> Any:
    call = admit(q, k, v, mask=mask, layout=layout, return_lse=lse)
    problem = call.problem.with_(device="cuda", arch="sm_90", dtype="bfloat16")
    can = registry["torch", "sdpa_flash"]
    assert can.capabilities_for("cuda").check(problem) == ()
    assert not list(can.extra(problem))
    return load_flash()(problem, {})(q, k, v, call.mask)


def hidden(mask: Mask, rows: int, layout: str) -> list[Tensor]:
    """Return which queries and keys are in no pair, to be broadcast to arrays of the layout."""
    from polyattn.torch.kit.masking import Dims, visible

    seen = visible(mask, Dims(6, 4, 1, rows, 16), torch.device("cpu")).mask
    seen = seen.expand(6, 1, rows, 16)[:, 0]
    sides = ~seen.any(-1), ~seen.any(-2)
    return [x[:, :, None, None] if layout == "BTNH" else x[:, None, :, None] for x in sides]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize(("rows", "causal", "spaced"), [
    (1, False, False), (1, False, True), (7, False, True), (16, False, False), (16, True, False),
    (16, True, True),
])  # fmt: skip
@pytest.mark.parametrize("name", MASKS)
def test_padding_is_what_it_is(
    name: str, rows: int, causal: bool, spaced: bool, kv_heads: int, layout: str, trains: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(ranges, "flash_forward", stand_in)
    mask = MASKS[name] & Causal() if causal else MASKS[name]
    q, k, v = arrays(layout, rows, kv_heads, spaced)
    no_rows, no_keys = hidden(mask, rows, layout)
    given = [
        x.masked_fill(no, math.nan).requires_grad_(trains)
        for x, no in ((q, no_rows), (k, no_keys), (v, no_keys))
    ]
    if spaced and not trains:
        for x, no in zip((k, v), (no_keys, no_keys), strict=True):
            x[no.expand_as(x)] = math.nan
        given = [given[0], k, v]
    monkeypatch.setattr("polyattn.masks.fits.ends", lambda read: (0, 0))  # as on a device: unread
    out, lse = run(*given, mask, layout)
    assert torch.equal(run(*given, mask, layout, lse=False), out)  # a way of its own, where read
    clean = [x.detach().nan_to_num(0).requires_grad_(trains) for x in given]
    exact, exact_lse = attention(
        *clean, mask=mask, layout=layout, return_lse=True, backend="reference"
    )
    assert torch.allclose(out, exact, atol=1e-5)
    assert torch.allclose(lse, exact_lse, atol=1e-5)
    if trains:
        seen = exact_lse.isfinite()
        coming = torch.randn_like(out)
        sums = torch.randn(seen.shape) * seen
        found = torch.autograd.grad((out, lse), given, (coming, sums))
        truth = torch.autograd.grad((exact, exact_lse), clean, (coming, sums))
        for one, other in zip(found, truth, strict=True):
            assert torch.allclose(one, other, atol=1e-4)


def test_caches_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    pointers = []

    def noting(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        pointers.append((k.data_ptr(), v.data_ptr()))
        return stand_in(q, k, v, *rest, **options)

    monkeypatch.setattr(ranges, "flash_forward", noting)
    for layout in ("BTNH", "BNTH"):
        q, k, v = arrays(layout, 1, 2, True)
        run(q, k, v, MASKS["keys"], layout)
        run(q, k, v, MASKS["keys"], layout, lse=False)
        run(q, k, v, MASKS["left and right"], layout)
        assert set(pointers) == {(k.data_ptr(), v.data_ptr())}
        pointers.clear()


def test_what_is_no_range_is_refused() -> None:
    q, k, v = arrays("BNTH", 7, 4, False)
    backend = registry["torch", "sdpa_flash"]
    keys = MASKS["keys"]
    for mask in (~keys, keys & Causal(), keys | MASKS["left"]):
        problem = admit(q, k, v, mask=mask, layout="BNTH").problem
        problem = problem.with_(device="cuda", arch="sm_90", dtype="bfloat16")
        checked = backend.capabilities_for("cuda").check(problem)
        assert checked or list(backend.extra(problem)), str(mask)


@pytest.mark.parametrize("rows", [7, 19])
def test_no_sequence_ends_behind_the_last_key(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does not ask; a checker may run it on what the backend refuses."""
    monkeypatch.setattr(ranges, "flash_forward", stand_in)
    q, k, v = arrays("BNTH", rows, 4, False)
    mask = MASKS["keys"] & Causal()
    call = admit(q, k, v, mask=mask, layout="BNTH")
    problem = call.problem.with_(device="cuda", arch="sm_90", dtype="bfloat16")
    with pytest.raises(ValueError, match=f"T={rows}, S=16"):
        load_flash()(problem, {})(q, k, v, call.mask)


@pytest.mark.parametrize("dynamic", [False, True])
def test_where_sequences_end_is_compiled(dynamic: bool) -> None:
    def ends(first: Tensor, last: Tensor, q: Tensor) -> tuple[Tensor, ...]:
        t = q.shape[1]
        first, last = first.clamp(0, t), last.clamp(0, t)
        sides = Side([first, last, last, t], t), Side([0, last, 5 * t], 5 * t)
        return marks(sides, q.shape[0], q.device)

    torch.compiler.reset()
    compiled = torch.compile(ends, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for batch, length in ((6, 16), (3, 16), (3, 9)):
        given = lengths(FIRSTS[:batch]), lengths(ENDS[:batch]), torch.zeros(batch, length)
        for one, other in zip(compiled(*given), ends(*given), strict=True):
            assert torch.equal(one, other)
            assert one.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64], ids=str)
@pytest.mark.parametrize("lse", [False, True])
def test_lengths_of_any_integers(lse: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more keys than some of them can count."""
    monkeypatch.setattr(ranges, "flash_forward", stand_in)
    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 300, 16), torch.randn(2, 4, 300, 16)
    ends = lengths([100, 3], dtype)
    for mask in (Padding(kv_lengths=ends), LeftPadding(kv_starts=ends)):
        found = run(q, k, v, mask, "BNTH", lse)
        exact = attention(q, k, v, mask=mask, layout="BNTH", backend="reference")
        assert torch.allclose(found[0] if lse else found, exact, atol=1e-5)


def test_more_sequences_or_rows_than_the_kernel_counts_are_refused() -> None:
    backend = registry["torch", "sdpa_flash"]
    q, k, v = arrays("BNTH", 16, 4, False)
    problem = admit(q, k, v, mask=MASKS["keys"], layout="BNTH").problem
    problem = problem.with_(device="cuda", arch="sm_90", dtype="bfloat16")
    for changes, fits in (
        ({"batch": 8192}, True), ({"batch": 8193}, False),
        ({"batch": 4096, "kv_len": 1 << 18}, True), ({"batch": 4096, "kv_len": 1 << 19}, False),
        ({"batch": 4096, "q_len": (1 << 18) + 1}, False),
    ):  # fmt: skip
        assert (not list(backend.extra(problem.with_(**changes)))) is fits, changes
