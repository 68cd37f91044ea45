"""Rows that share packed tiles: how many they are depends on the threads, results do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from polyattn.masks import BlockMap, Mask
from polyattn.native import module
from polyattn.selection.registry import Available
from polyattn.torch import attention

pytestmark = pytest.mark.skipif(
    not isinstance(module.status(), Available), reason="the native kernels are not built here"
)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(
    batch: int, heads: int, length: int, keys: int, dim: int, dtype: torch.dtype, layout: str
) -> tuple[Tensor, ...]:
    torch.manual_seed(length + keys)
    arrays = []
    for n in (length, keys, keys):
        shape = (batch, heads, n, dim) if layout == "BNTH" else (batch, n, heads, dim)
        x = torch.randn(shape).to(dtype)
        arrays.append(x.transpose(1, 2) if layout == "BNTH" else x)
    return tuple(arrays)


def some_blocks(length: int, keys: int, kept: int) -> BlockMap:
    """A map in which each row of blocks sees `kept` blocks of keys, the first row none."""
    rows, columns = -(-length // 64), -(-keys // 64)
    order = torch.stack([torch.randperm(columns) for _ in range(rows)]).int()
    counts = torch.full((rows,), kept, dtype=torch.int32)
    counts[0] = 0
    return BlockMap(64, 64, order[None, None], counts[None, None])


def with_threads(threads: int, arrays: tuple[Tensor, ...], mask: Mask | None) -> Tensor:
    torch.set_num_threads(threads)
    return attention(*arrays, mask=mask, backend="native_cpu")


# of 516 and 1,028 rows the last 4 are met as few rows are, by any number of threads
@pytest.mark.parametrize("layout", ["BNTH", "BTNH"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "length", "keys", "kept"),
    [(2, 12, 512, 500, 0), (2, 12, 516, 200, 0), (1, 32, 1028, 1000, 3), (1, 32, 1100, 4200, 9)],
)
def test_the_same_bits_on_any_threads(
    batch: int, heads: int, length: int, keys: int, kept: int, dtype: torch.dtype, layout: str
) -> None:
    arrays = draw(batch, heads, length, keys, 32, dtype, layout)
    mask = some_blocks(length, keys, kept) if kept else None
    few = with_threads(1, arrays, mask)
    assert torch.equal(few, with_threads(2, arrays, mask))
    assert torch.equal(few, with_threads(16, arrays, mask))


# 4,200 keys are more than stay packed at once, of head dim 128 also 2,100
@pytest.mark.parametrize(("keys", "dim"), [(700, 64), (4200, 64), (2100, 128), (2100, 72)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_as_the_reference(keys: int, dim: int, dtype: torch.dtype) -> None:
    arrays = draw(1, 2, 300, keys, dim, dtype, "BNTH")
    mask = some_blocks(300, keys, 10)
    exact = attention(*(x.double() for x in arrays), mask=mask, backend="reference")
    bound = 2e-6 if dtype == torch.float32 else 2e-2
    ours = with_threads(1, arrays, mask)
    torch.testing.assert_close(ours.double(), exact, atol=bound, rtol=bound)
    assert not ours[:, :64].any()  # rows that see no key


@pytest.mark.parametrize("heads", [2, 32])
def test_what_is_masked_leaks_nothing(heads: int) -> None:
    """A NaN value is seen by the rows that see it, and the others keep their bits."""
    q, k, v = draw(1, heads, 300, 640, 64, torch.float32, "BNTH")
    mask = some_blocks(300, 640, 4) & some_blocks(300, 640, 8)
    whole = with_threads(1, (q, k, v), mask)
    v[:, 77] = float("nan")
    exact = attention(q.double(), k.double(), v.double(), mask=mask, backend="reference")
    ours = with_threads(1, (q, k, v), mask)
    assert torch.equal(ours.isnan(), exact.isnan())
    assert ours.isnan().any() and not ours.isnan().all()
    assert torch.equal(ours[~ours.isnan()], whole[~ours.isnan()])
