"""Keys in pages: every backend that declares them, against sequences gathered by hand."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
import torch

from polyattn import record_selections, use_backend
from polyattn.errors import InvalidProblem, Unsupported
from polyattn.masks import Causal, Chunked, Dilated, FirstKeys, Mask, Padding, Window
from polyattn.selection.registry import Available, registry
from polyattn.torch import attention, paged_attention

B, N, K, H, PAGE, PAGES, MOST = 4, 6, 2, 24, 16, 40, 9
LENGTHS = torch.tensor([0, 5, 16, 131])
BACKENDS = [
    name
    for name in ("native_cpu", "reference")
    if name in registry.names("torch") and isinstance(registry.probe(("torch", name)), Available)
]
TINY = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
every_backend = pytest.mark.parametrize("name", BACKENDS)


def cache(v: int = H, dtype: torch.dtype = torch.float32, layout: str = "BTNH") -> list[Any]:
    """Return pages of keys and of values; what no sequence has a use for is NaN."""
    generator = torch.Generator().manual_seed(7)
    pages = [torch.randn((PAGES, PAGE, K, d), generator=generator).to(dtype) for d in (H, v)]
    table = torch.randperm(PAGES, generator=generator)[: B * MOST].reshape(B, MOST)
    for b, length in enumerate(LENGTHS.tolist()):
        for page in range(MOST):
            for x in pages:
                x[table[b, page], max(0, min(PAGE, length - page * PAGE)) :] = float("nan")
        table[b, -(-length // PAGE) :] = -1
    if layout == "BNTH":
        pages = [x.transpose(1, 2).contiguous() for x in pages]
    return [*pages, table]


def queries(t: int, dtype: torch.dtype = torch.float32, layout: str = "BTNH") -> torch.Tensor:
    q = torch.randn((B, t, N, H), generator=torch.Generator().manual_seed(t)).to(dtype)
    return q.transpose(1, 2).contiguous() if layout == "BNTH" else q


def by_hand(q: torch.Tensor, k: Any, v: Any, table: Any, layout: str, **options: Any) -> Any:
    """Gather each sequence and attend to it alone, in float64."""
    found = []
    for b, length in enumerate(LENGTHS.tolist()):
        rows = []
        for pages in (k, v):
            pages = pages.transpose(1, 2) if layout == "BNTH" else pages
            each = [pages[table[b, j // PAGE], j % PAGE] for j in range(length)]
            rows.append(
                torch.stack(each)[None] if each else pages.new_empty((1, 0, K, v.shape[-1]))
            )
        if not length:
            rows[0] = q.new_empty((1, 0, K, H))
        one = q[b : b + 1].transpose(1, 2) if layout == "BNTH" else q[b : b + 1]
        wide = [x.double() for x in (one, *rows)]
        found.append(attention(*wide, return_lse=True, backend="reference", **options))
    out = torch.cat([out for out, _ in found])
    return out.transpose(1, 2) if layout == "BNTH" else out, torch.cat([lse for _, lse in found])


MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": Causal() & Window(left=7),
    "either": Window(left=3, right=0) | Window(left=40, right=0),
    "chunks": Chunked(10) & Causal(),
    "first keys": Causal() & (Window(left=4) | FirstKeys(2)),
    "complement": ~Dilated(3) & Causal(),
    "too_many_for_a_program": functools.reduce(
        operator.or_, (Window(left=3 * i, right=20 - i) for i in range(20))
    ),
}


@every_backend
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("t", [1, 3, 20])
@pytest.mark.parametrize("kind", MASKS)
def test_every_sequence_by_itself(name: str, kind: str, t: int, layout: str) -> None:
    k, v, table = cache(v=16, layout=layout)
    q, mask = queries(t, layout=layout), MASKS[kind]
    got = paged_attention(
        q, k, v, table, LENGTHS, mask=mask, layout=layout, return_lse=True, backend=name
    )
    wanted = by_hand(q, k, v, table, layout, mask=mask)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@every_backend
@pytest.mark.parametrize("dtype", TINY, ids=str)
def test_sinks_softcap_scale_and_narrow_integers(name: str, dtype: torch.dtype) -> None:
    k, v, table = cache(dtype=dtype)
    q, sinks = queries(2, dtype), torch.randn(N, 2, dtype=dtype)
    options: dict[str, Any] = {"softcap": 4.0, "scale": 0.3}
    got = paged_attention(
        q, k, v, table.int(), LENGTHS.int(), sinks=sinks, return_lse=True, backend=name, **options
    )
    wanted = by_hand(q, k, v, table, "BTNH", mask=Causal(), sinks=sinks.double(), **options)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=TINY[dtype], atol=TINY[dtype])


@every_backend
def test_tables_and_pages_at_any_strides(name: str) -> None:
    k, v, table = cache()
    q = queries(3)
    wanted = paged_attention(q, k, v, table, LENGTHS, backend=name)
    wide = torch.zeros(B, 2 * MOST, dtype=torch.int64)
    wide[:, ::2] = table
    fused = torch.stack([k, v], 1)  # one cache of keys and values
    for each in ((k, v, wide[:, ::2]), (fused[:, 0], fused[:, 1], table)):
        assert torch.equal(paged_attention(q, *each, LENGTHS, backend=name), wanted)


@every_backend
def test_growing_sequences_are_seen(name: str) -> None:
    k, v, table = cache()
    lengths, q = LENGTHS.clone(), queries(1)
    first = paged_attention(q, k, v, table, lengths, backend=name)
    lengths[3] = 100
    again = paged_attention(q, k, v, table, lengths, backend=name)
    assert torch.equal(first[:3], again[:3]) and not torch.equal(first[3], again[3])


def test_the_reference_trains_through_pages() -> None:
    k, v, table = cache()
    k, v = (x.nan_to_num().requires_grad_() for x in (k, v))
    out = paged_attention(queries(2), k, v, table, LENGTHS, backend="reference")
    for grad in torch.autograd.grad(out.sum(), (k, v)):
        assert grad[table[3, 0]].any() and not grad[table[1, 0], 5:].any()


@pytest.mark.skipif("native_cpu" not in BACKENDS, reason="the extension is not built")
def test_chosen_by_itself_and_refused_with_reasons() -> None:
    k, v, table = cache()
    with record_selections() as ran:
        paged_attention(queries(1), k, v, table, LENGTHS)
    assert ran[0].backend == "native_cpu" and ran[0].problem.paged == PAGE
    for name in ("sdpa_flash", "sdpa_math", "flex"):
        with use_backend(name), pytest.raises(Unsupported, match="paged keys"):
            paged_attention(queries(1), k, v, table, LENGTHS)
    with pytest.raises(Unsupported, match="gradients"):
        q = queries(1).requires_grad_()
        paged_attention(q, k, v, table, LENGTHS, backend="native_cpu")
    with torch.no_grad():
        assert paged_attention(q, k, v, table, LENGTHS, backend="native_cpu").shape == q.shape


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"lengths": torch.tensor([0, 5, 16, 145])}, "lengths from 0 to 145"),
        ({"lengths": torch.tensor([0, -1, 16, 3])}, "lengths from -1"),
        ({"lengths": torch.tensor([1, 2])}, "lengths .2,."),
        ({"lengths": torch.rand(B)}, "float32"),
        ({"table": torch.zeros(B, dtype=torch.int64)}, "block table"),
        ({"table": torch.zeros(2, MOST, dtype=torch.int64)}, "block_table .2, 9."),
        ({"table": torch.full((B, MOST), PAGES)}, "block table"),
        ({"table": torch.full((B, MOST), -1)}, "block table"),
        ({"mask": Causal("top_left")}, "bottom_right"),
        ({"mask": Padding(None, [1, 2, 3, 4])}, "length hides"),
        ({"mask": torch.ones(1)}, "masks of positions"),
        ({"layout": "packed"}, "packing"),
        ({"v": torch.zeros(PAGES - 1, PAGE, K, H)}, "39 pages of values"),
        ({"v": torch.zeros(PAGES, PAGE + 1, K, H)}, "as many keys"),
        ({"q": torch.zeros(B, N, H)}, "4 dims"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@every_backend
def test_wrong_calls(name: str, changes: dict[str, Any], about: str) -> None:
    k, v, table = cache()
    given = {"q": queries(1), "k": k, "v": v, "table": table, "lengths": LENGTHS, **changes}
    options = {key: given.pop(key) for key in ("mask", "layout") if key in given}
    with pytest.raises(InvalidProblem, match=about):
        paged_attention(*given.values(), **options, backend=name)


def test_compilers_are_told() -> None:
    k, v, table = cache()
    compiled = torch.compile(paged_attention, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"inside torch\.compile"):
        compiled(queries(1), k, v, table, LENGTHS)


@every_backend
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("t", [1, 3])
def test_no_sequences_and_no_pages_in_use(name: str, layout: str, t: int) -> None:
    k, v, table = cache(layout=layout)
    q, options = queries(t, layout=layout), {"layout": layout, "return_lse": True, "backend": name}
    rows = (N, t) if layout == "BNTH" else (t, N)
    for mask in (None, Causal()):
        out, lse = paged_attention(q[:0], k, v, table[:0], LENGTHS[:0], mask=mask, **options)
        assert out.shape == (0, *rows, H) and lse.shape == (0, N, t)
        out, lse = paged_attention(q, k, v, table[:, :0], LENGTHS * 0, mask=mask, **options)
        assert out.shape == (B, *rows, H) and not out.any()
        assert lse.shape == (B, N, t) and bool((lse == float("-inf")).all())
