"""Few query rows in tiles: neighbouring columns of values share a product, and stay apart."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from polyattn.masks import Causal, FirstKeys, Mask, Padding, Window
from polyattn.native import forms, module
from polyattn.native.forms import BFLOAT16, Form, isa_for
from polyattn.selection.registry import Available
from polyattn.torch import attention, quantize_kv, quantized_attention

pytestmark = pytest.mark.skipif(
    not isinstance(module.status(), Available), reason="the native kernels are not built here"
)
IN_TILES = [form for form in ("amx", "amx_twin") if form in module.isas()]
HEADS, KEYS = 8, 150


def draw(rows: int, dim: int = 72, keys: int = KEYS) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a query for `rows` heads of a group, and keys and values of two groups."""
    torch.manual_seed(rows * dim)
    q = torch.randn(1, 1, 2 * rows, dim).bfloat16()
    k, v = torch.randn(2, 1, keys, 2, dim).bfloat16()
    return q, k, v


def native(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tensor:
    return attention(q, k, v, mask=mask, backend="native_cpu")


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("column", [0, 1, 6, 71])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
def test_what_is_not_finite_stays_in_its_column(
    rows: int, column: int, bad: float, tiles: str
) -> None:
    q, k, v = draw(rows)
    clean = native(q, k, v)
    v[0, 37, 1, column] = bad
    struck = native(q, k, v)
    assert torch.equal(struck[..., :rows, :], clean[..., :rows, :])  # the other group
    there = struck[..., rows:, :]
    assert not there[..., column].isfinite().any()
    there[..., column] = clean[..., rows:, column]
    assert torch.equal(there, clean[..., rows:, :])


@pytest.mark.parametrize("keys", [150, 1100])
@pytest.mark.parametrize("seen", ["padding", "window", "first and window"])
@pytest.mark.parametrize("rows", [3, 4, 7])
def test_what_is_masked_changes_no_bit(rows: int, seen: str, keys: int, tiles: str) -> None:
    """Also where tiles that follow one another share their sums, and where some are passed over."""
    q, k, v = draw(rows, keys=keys)
    mask, unseen = {
        "padding": (Padding(kv_lengths=torch.tensor([keys - 50])), slice(keys - 50, None)),
        "window": (Window(left=20), slice(0, keys - 21)),
        "first and window": (FirstKeys(10) | Window(left=90), slice(10, keys - 91)),
    }[seen]
    clean = native(q, k, v, mask)
    exact = attention(*(x.double() for x in (q, k, v)), mask=mask, backend="reference")
    torch.testing.assert_close(clean.double(), exact, atol=2e-2, rtol=2e-2)
    for x in (k, v):
        x[0, unseen] = math.nan
    assert torch.equal(native(q, k, v, mask), clean)


@pytest.mark.parametrize("heads", [1, 2])
def test_what_one_row_sees_changes_no_bit_of_another(heads: int, tiles: str) -> None:
    """A NaN that two queries of a sequence see and two do not, where tiles share their sums."""
    torch.manual_seed(heads)
    q = torch.randn(1, 4, heads, 72).bfloat16()
    k, v = torch.randn(2, 1, 700, 1, 72).bfloat16()
    mask = Causal(align="bottom_right") & Window(left=300)
    clean = native(q, k, v, mask)
    v[0, 397, 0, 5] = math.nan  # the first query sees keys 396 to 696
    struck = native(q, k, v, mask)
    assert struck[0, :2, :, 5].isnan().all()
    assert torch.equal(struck[0, 2:], clean[0, 2:])


@pytest.mark.parametrize("dim", [1, 31, 32, 33, 64, 100, 128, 160, 256])
@pytest.mark.parametrize("rows", [3, 8])
def test_nothing_behind_a_row_is_read(rows: int, dim: int, tiles: str) -> None:
    """Tiles are whole, and heads are not: what lies behind them is another's."""
    q, k, v = draw(rows, dim)
    wide = [torch.full((1, KEYS, 2, dim + 40), math.nan).bfloat16() for _ in range(2)]
    for x, to in zip((k, v), wide, strict=True):
        to[..., :dim] = x
    out = native(q, wide[0][..., :dim], wide[1][..., :dim])
    exact = attention(*(x.double() for x in (q, k, v)), backend="reference")
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(("rows", "dim"), [(3, 17), (4, 64), (5, 100), (8, 128), (4, 300)])
def test_codes_are_what_they_stand_for(rows: int, dim: int, codes: str, tiles: str) -> None:
    q, k, v = draw(rows, dim)
    (key_codes, key_scales), (value_codes, value_scales) = (
        quantize_kv(x, dtype=codes, block_size=32) for x in (k, v)
    )
    out = quantized_attention(
        q,
        key_codes,
        value_codes,
        key_scales,
        value_scales,
        block_size=32,
        mask=None,
        backend="native_cpu",
    )

    def decoded(x: Tensor, scales: Tensor) -> Tensor:
        each = scales.double().transpose(1, 2).repeat_interleave(32, dim=1)[:, :KEYS]
        return x.double() * each[..., None]

    exact = attention(
        q.double(),
        decoded(key_codes, key_scales),
        decoded(value_codes, value_scales),
        backend="reference",
    )
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)


def test_few_rows_take_the_tiles_where_many_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYATTN_NATIVE_ISA", raising=False)
    here = module.isas()
    try:
        for name in (here[0], *IN_TILES[:1]):
            monkeypatch.setattr(forms, "_found", Form(name, "its peak is higher"))
            forms._place.cache_clear()
            expected = name if name == "amx" else here[0]
            assert here[isa_for(BFLOAT16, 1, 32, 8)] == expected
    finally:
        forms._place.cache_clear()
