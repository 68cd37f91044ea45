"""Decoding where the heads of a key lie side by side: they are read together, and stay apart."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from polyattn.masks import BlockMap, Mask, Padding, Segments, Window
from polyattn.native import module
from polyattn.selection.registry import Available
from polyattn.torch import attention, paged_attention, quantize_kv, quantized_attention

pytestmark = pytest.mark.skipif(
    not isinstance(module.status(), Available), reason="the native kernels are not built here"
)
KEYS = 2100  # from 2,048 on, and no whole tile at the end


def draw(heads: int, kv_heads: int, dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(heads * dim)
    q = torch.randn(2, 1, heads, dim).to(dtype)
    k, v = (torch.randn(2, KEYS, kv_heads, dim).to(dtype) for _ in range(2))
    return q, k, v


def both(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
    ours = attention(q, k, v, mask=mask, backend="native_cpu")
    exact = attention(q.double(), k.double(), v.double(), mask=mask, backend="reference")
    return ours, exact


def masks(heads: int) -> dict[str, Mask | None]:
    columns = -(-KEYS // 64)
    order = torch.stack([torch.randperm(columns) for _ in range(heads)]).int()
    counts = torch.arange(1, heads + 1, dtype=torch.int32) % columns  # another part for each head
    return {
        "all": None,
        "window": Window(left=700),
        "padding": Padding(kv_lengths=torch.tensor([1, 1999])),
        "blocks of each head": BlockMap(64, 64, order[None, :, None], counts[None, :, None]),
    }


@pytest.mark.parametrize("kind", ["all", "window", "padding", "blocks of each head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(8, 8, 64), (32, 8, 40), (24, 3, 96), (22, 11, 17), (12, 2, 128)]
)
def test_as_the_reference(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, kind: str
) -> None:
    ours, exact = both(*draw(heads, kv_heads, dtype, dim), masks(heads)[kind])
    bound = 2e-6 if dtype == torch.float32 else 2e-2 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(ours.double(), exact, atol=bound, rtol=bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_heads_that_lie_apart_give_the_same(dtype: torch.dtype, bound: float) -> None:
    """But for rounding: the soft-max takes other steps."""
    q, k, v = draw(32, 8, dtype, 64)
    together = attention(q, k, v, backend="native_cpu")
    alone = attention(
        q.transpose(1, 2), *(x.transpose(1, 2).contiguous() for x in (k, v)),
        layout="BNTH", backend="native_cpu",
    )  # fmt: skip
    torch.testing.assert_close(together, alone.transpose(1, 2), atol=bound, rtol=bound)


def test_a_masked_nan_reaches_nobody() -> None:
    q, k, v = draw(32, 8, torch.float32, 64)
    mask = Padding(kv_lengths=torch.tensor([1500, 2000]))
    clean, _ = both(q, k, v, mask)
    v[0, 1500:, 3] = torch.nan
    v[1, 2000:] = torch.inf
    k[0, 1700] = torch.nan
    assert torch.equal(attention(q, k, v, mask=mask, backend="native_cpu"), clean)
    v[1, 10, 5] = torch.nan  # seen by the group of one key head alone
    seen = attention(q, k, v, mask=mask, backend="native_cpu")
    assert seen[1, 0, 20:24].isnan().all() and torch.equal(seen[0], clean[0])
    assert torch.equal(seen[1, 0, :20], clean[1, 0, :20])


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 9])
@pytest.mark.parametrize("form", module.isas())
def test_a_masked_nan_changes_no_bit(
    form: str, heads: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is run again, head by head, has the sums of heads that walked together.

    One half of the keys nearly cancels the other, so that another order of sums is seen.
    """
    if module.load().refusal(module.isas().index(form)):
        pytest.skip(f"{form} does not run here")
    monkeypatch.setenv("POLYATTN_NATIVE_ISA", form)
    dtype = torch.float16 if kind == "float16" else torch.bfloat16
    q, k, v = draw(heads, 9 if heads == 9 else 8, dtype, 64)
    half = KEYS // 2
    k[:, half:] = k[:, :half]
    v[:, half:] = v[:, :half] * -(1 + 1 / 64)
    seen = torch.rand(2, KEYS // 4) < 0.8  # by fours, as scales are
    mask = Segments(torch.ones(2, 1, dtype=int), seen.repeat_interleave(4, 1).long())
    clean = run(q, k, v, mask, kind)
    v[~seen.repeat_interleave(4, 1)] = torch.nan
    assert torch.equal(run(q, k, v, mask, kind), clean)


def run(q: Tensor, k: Tensor, v: Tensor, mask: Mask, kind: str) -> Tensor:
    if kind in ("bfloat16", "float16"):
        return attention(q, k, v, mask=mask, backend="native_cpu")
    unseen = v.isnan()
    cache = [quantize_kv(x.nan_to_num(0.5), dtype=kind, block_size=4) for x in (k, v)]
    (keys, key_scales), (values, value_scales) = cache
    value_scales[unseen[:, ::4, :, 0].transpose(1, 2)] = torch.nan
    return quantized_attention(
        q, keys, values, key_scales, value_scales, block_size=4, mask=mask, backend="native_cpu"
    )


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("page", [2, 16, 100])
def test_pages_change_no_bit(layout: str, page: int) -> None:
    q, k, v = draw(32, 8, torch.bfloat16, 64)
    count = -(-KEYS // page)
    order = torch.randperm(2 * count)
    table = order.argsort().view(2, count)

    def in_pages(x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, count * page - KEYS), value=torch.nan)
        pages = padded.view(2 * count, page, 8, 64)[order]
        return pages.contiguous() if layout == "BTNH" else pages.transpose(1, 2).contiguous()

    q = q if layout == "BTNH" else q.transpose(1, 2)
    lie = (k, v) if layout == "BTNH" else (x.transpose(1, 2).contiguous() for x in (k, v))
    expected = attention(q, *lie, layout=layout, backend="native_cpu")
    lengths = torch.full((2,), KEYS)
    out = paged_attention(
        q, in_pages(k), in_pages(v), table, lengths, mask=None, layout=layout, backend="native_cpu"
    )
    torch.testing.assert_close(out, expected, atol=0, rtol=0)
