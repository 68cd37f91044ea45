"""Two to eight query rows of one key head: rows that lie side by side in vectors do not mix."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from polyattn.masks import Padding
from polyattn.native import module
from polyattn.native.forms import FEW_ROWS
from polyattn.selection.registry import Available
from polyattn.torch import attention, paged_attention

pytestmark = pytest.mark.skipif(
    not isinstance(module.status(), Available), reason="the native kernels are not built here"
)
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dim", [1, 5, 8, 33, 40, 64, 72, 128, 200])
@pytest.mark.parametrize("rows", range(1, FEW_ROWS + 1))
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_as_the_reference(rows: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows * dim)
    q = torch.randn(2, 1, 2 * rows, dim).to(dtype)
    k, v = (torch.randn(2, 77, 2, width).to(dtype) for width in (dim, max(1, dim // 2)))
    mask = Padding(kv_lengths=torch.tensor([77, 31]))
    ours = attention(q, k, v, mask=mask, backend="native_cpu")
    exact = attention(q.double(), k.double(), v.double(), mask=mask, backend="reference")
    torch.testing.assert_close(ours.double(), exact, atol=BOUND[dtype], rtol=BOUND[dtype])


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_a_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    q = torch.randn(1, 1, 4, 64).to(dtype)
    k, v = (torch.randn(1, 50, 1, 64).to(dtype) for _ in range(2))
    clean = attention(q, k, v, backend="native_cpu")
    q[0, 0, 2] = torch.nan
    spoilt = attention(q, k, v, backend="native_cpu")
    assert spoilt[0, 0, 2].isnan().all()
    assert torch.equal(spoilt[0, 0, [0, 1, 3]], clean[0, 0, [0, 1, 3]])


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("page", [3, 16, 100])
def test_in_pages(dtype: torch.dtype, page: int) -> None:
    """Also where the last page of a sequence is the last of the memory."""
    torch.manual_seed(page)
    lengths = torch.tensor([2500, 2049])
    pages = -(-2500 // page)
    key_pages, value_pages = (torch.randn(2 * pages, page, 2, 64).to(dtype) for _ in range(2))
    table = torch.randperm(2 * pages).reshape(2, pages)
    q = torch.randn(2, 1, 8, 64).to(dtype)
    ours = paged_attention(q, key_pages, value_pages, table, lengths, backend="native_cpu")
    exact = paged_attention(
        q.double(), key_pages.double(), value_pages.double(), table, lengths, backend="reference"
    )
    torch.testing.assert_close(ours.double(), exact, atol=BOUND[dtype], rtol=BOUND[dtype])
