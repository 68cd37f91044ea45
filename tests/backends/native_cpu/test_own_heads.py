"""Decoding with many heads, where each thread begins with its own: each once, the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from polyattn import Padding
from polyattn.native import module
from polyattn.selection.registry import Available
from polyattn.torch import attention, paged_attention, quantize_kv, quantized_attention

pytestmark = pytest.mark.skipif(
    not isinstance(module.status(), Available), reason="the native kernels are not built here"
)

KEYS, DIM = 700, 64
THREADS = (2, 3, 5, 8, 16)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_same_with_any_threads(call: Any) -> None:
    torch.set_num_threads(1)
    expected = call()
    for count in THREADS:
        torch.set_num_threads(count)
        assert torch.equal(call(), expected), count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (5, 5), (12, 12), (13, 13), (12, 3), (32, 8)])
@pytest.mark.parametrize("batch", [1, 3])
def test_heads_of_each_sequence(
    batch: int, heads: tuple[int, int], layout: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(sum(heads))

    def draw(count: int, rows: int) -> Any:
        shape = (batch, rows, count, DIM) if layout == "BTNH" else (batch, count, rows, DIM)
        return torch.randn(shape).to(dtype)

    q, k, v = draw(heads[0], 1), draw(heads[1], KEYS), draw(heads[1], KEYS)
    lengths = torch.tensor([KEYS, 0, 33][:batch])
    for mask in (None, Padding(kv_lengths=lengths)):
        call = lambda mask=mask: attention(  # noqa: E731
            q, k, v, mask=mask, layout=layout, backend="native_cpu"
        )
        assert_same_with_any_threads(call)
        wanted = attention(
            q.double(), k.double(), v.double(), mask=mask, layout=layout, backend="reference"
        )
        assert (call() - wanted).abs().max() <= (2e-6 if dtype == torch.float32 else 1e-2)


def test_heads_in_pages_and_as_codes() -> None:
    torch.manual_seed(0)
    q = torch.randn(3, 1, 24, DIM).bfloat16()
    pages = torch.randn(2, 40, 16, 12, DIM).bfloat16()
    table = torch.randperm(40)[:36].view(3, 12)
    lengths = torch.tensor([192, 0, 50])
    assert_same_with_any_threads(
        lambda: paged_attention(q, *pages, table, lengths, backend="native_cpu")
    )
    keys = torch.randn(2, 3, KEYS, 12, DIM)
    (k, k_scales), (v, v_scales) = (quantize_kv(x, block_size=32) for x in keys)
    assert_same_with_any_threads(
        lambda: quantized_attention(
            q, k, v, k_scales, v_scales, block_size=32, mask=None, backend="native_cpu"
        )
    )
