"""In tiles the first sums of values are not added to what was in memory, which may be anything."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from polyattn.masks import BlockMap, Causal, Mask, Padding, Window
from polyattn.native import module
from polyattn.selection.registry import Available
from polyattn.torch import attention

pytestmark = pytest.mark.skipif(
    not isinstance(module.status(), Available), reason="the native kernels are not built here"
)
B, T, N, H = 2, 300, 2, 64
# of 5 x 5 blocks: a strip that sees nothing, one that sees the last keys alone
SEEN = torch.tensor(
    [[1, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0]]
)


def blocks(seen: Tensor) -> BlockMap:
    """Make a map that shows what `seen` says, in blocks of 64."""
    order = seen.argsort(dim=-1, descending=True, stable=True).int()
    return BlockMap(64, 64, order[None, None], seen.sum(-1, dtype=torch.int32)[None, None])


MASKS: dict[str, Mask] = {
    "no keys of one entry": Padding(torch.tensor([0, 170])),
    "no keys for rows": Causal() & Padding(torch.tensor([200, 300])) & Window(left=20),
    "blocks": blocks(SEEN),
    "blocks of few": blocks(SEEN) & Causal(),
    "all": Window(left=1000, right=1000),
}


def dirty(like: Tensor, mask: Mask) -> None:
    """Leave sums that are NaN or infinite where a call like this one has its own."""
    every = blocks(torch.ones_like(SEEN)) if isinstance(mask, BlockMap) else Causal()
    for value in (math.inf, math.nan):
        values = torch.full_like(like, value)
        for _ in range(5):
            attention(like, like, values, mask=every, backend="native_cpu")


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_an_earlier_call_is_left(mask: str, sinks: bool, dtype: torch.dtype) -> None:
    _holds(mask, sinks, dtype)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_nothing_of_an_earlier_call_is_left_in_tiles(mask: str, sinks: bool, tiles: str) -> None:
    _holds(mask, sinks, torch.bfloat16)


def _holds(mask: str, sinks: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, N, H).to(dtype) for _ in range(3))
    sink = torch.randn(N) if sinks else None
    exact, exact_lse = attention(
        q.double(),
        k.double(),
        v.double(),
        mask=MASKS[mask],
        sinks=sink,
        return_lse=True,
        backend="reference",
    )
    dirty(q, MASKS[mask])
    out, lse = attention(
        q, k, v, mask=MASKS[mask], sinks=sink, return_lse=True, backend="native_cpu"
    )
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), exact.double(), atol=bound, rtol=bound)
    torch.testing.assert_close(lse.double(), exact_lse.double(), atol=1e-3, rtol=1e-5)
