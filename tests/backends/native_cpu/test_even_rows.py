"""Few query rows meet keys that lie evenly without looking them up: the bits of keys in pages."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from polyattn.native import module
from polyattn.selection.registry import Available
from polyattn.torch import attention, paged_attention

pytestmark = pytest.mark.skipif(
    not isinstance(module.status(), Available), reason="the native kernels are not built here"
)
# around a vector of rows, a tile, a chunk, what is fetched by pages, and where heads walk together
LENGTHS = [1, 2, 15, 16, 17, 63, 65, 100, 511, 512, 513, 640, 1100, 2100]


def forms() -> list[str]:
    """Name the forms of the kernels that run here."""
    if not isinstance(module.status(), Available):
        return []
    return [name for i, name in enumerate(module.isas()) if not module.load().refusal(i)]


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("dim", [40, 64, 80, 128, 192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", forms())
def test_as_keys_in_pages(
    form: str, dtype: torch.dtype, dim: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYATTN_NATIVE_ISA", form)
    heads, size = 2, 16
    for length in LENGTHS:
        torch.manual_seed(length)
        count = -(-length // size)
        k, v = (torch.randn(1, count * size, heads, dim).to(dtype) for _ in range(2))
        order = torch.randperm(count)
        pages = [torch.empty(count, size, heads, dim, dtype=dtype) for _ in range(2)]
        for page, x in zip(pages, (k, v), strict=True):
            page[order] = x.view(count, size, heads, dim)
        k, v = k[:, :length], v[:, :length]
        if layout == "BNTH":
            k, v, *pages = (x.transpose(1, 2).contiguous() for x in (k, v, *pages))
        for group in (1, 2, 4):
            q = torch.randn(1, 1, heads * group, dim).to(dtype)
            if layout == "BNTH":
                q = q.transpose(1, 2)
            even = attention(q, k, v, layout=layout, backend="native_cpu")
            paged = paged_attention(
                q, *pages, order[None], torch.tensor([length]), layout=layout, backend="native_cpu"
            )
            assert torch.equal(even, paged), (length, group)


@pytest.mark.parametrize("stride", [0, 1, 2])
def test_rows_that_lie_in_any_step(stride: int) -> None:
    """Keys that are all one row, neighbours, or every second row, which all heads share."""
    torch.manual_seed(0)
    whole = torch.randn(2, 1300, 64)
    kept = whole[:, :1] if stride == 0 else whole[:, ::stride]
    k, v = (x.expand(600, 64) if stride == 0 else x[:600] for x in kept)
    q = torch.randn(3, 1, 64)
    arrays = [x[None].expand(3, -1, -1)[None] for x in (k, v)]
    found = attention(q[None], *arrays, layout="BNTH", backend="native_cpu")
    exact = attention(
        q[None].double(), *(x.double() for x in arrays), layout="BNTH", backend="reference"
    )
    bound = 2e-5 if stride == 0 else 2e-6  # one number 600 times: what is rounded off adds up
    torch.testing.assert_close(found.double(), exact, atol=bound, rtol=bound)
