"""Keys in pages, drawn at random: all sequences are one call, each with its own number of keys."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from polyattn import Causal, Chunked, Dilated, FirstKeys, Window
from polyattn.masks import Mask
from polyattn.native import module
from polyattn.selection.registry import Available
from polyattn.torch import paged_attention

pytestmark = pytest.mark.skipif(
    not isinstance(module.status(), Available), reason="the native kernels are not built here"
)
BOUNDS = {torch.float32: 5e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}


def draw_mask(rng: random.Random) -> Mask | None:
    masks: list[Mask] = [
        Causal(), Window(rng.randrange(40)), Window(rng.randrange(40), rng.randrange(20)),
        Chunked(rng.randrange(1, 40)), Dilated(rng.randrange(1, 5)), FirstKeys(rng.randrange(10)),
    ]  # fmt: skip
    one, other = rng.sample(masks, 2)
    return rng.choice([None, one, one & other, one | other, ~one])


def draw(rng: random.Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Draw the arrays and the options of a call."""
    torch.manual_seed(rng.randrange(1 << 30))
    batch, kv_heads, group = rng.choice([1, 2, 3, 5]), rng.choice([1, 2, 4]), rng.choice([1, 2, 8])
    head_dim, size, columns = (
        rng.choice([8, 64, 72]),
        rng.choice([1, 4, 16, 64]),
        rng.randint(2, 20),
    )
    rows = rng.choice([1, 1, 1, 2, 3, 7, 20, 70])
    layout, count = rng.choice(["BTNH", "BNTH"]), rng.randint(1, batch * columns + 2)
    page = (size, kv_heads) if layout == "BTNH" else (kv_heads, size)
    place = (rows, kv_heads * group) if layout == "BTNH" else (kv_heads * group, rows)
    pages = [torch.randn(count, *page, head_dim) for _ in range(2)]
    query = torch.randn(batch, *place, head_dim)
    lengths = torch.tensor([rng.choice([0, size * columns, rng.randrange(size * columns)])
                            for _ in range(batch)])  # fmt: skip
    table = torch.randint(0, count, (batch, columns))
    for row, length in zip(table, lengths.tolist(), strict=True):
        row[-(-length // size) :] = rng.choice([-1, 1 << 20])  # nothing there means anything
    integers = rng.choice([torch.int32, torch.int64])
    options = {
        "mask": draw_mask(rng), "layout": layout, "softcap": rng.choice([None, 5.0]),
        "sinks": rng.choice([None, torch.randn(kv_heads * group)]),
    }  # fmt: skip
    return (query, *pages, table.to(integers), lengths.to(integers)), options


@pytest.mark.parametrize("seed", range(40))
def test_calls_on_pages(seed: int) -> None:
    rng = random.Random(seed)
    for dtype, bound in BOUNDS.items():
        (*arrays, table, lengths), options = draw(rng)
        arrays = [x.to(dtype) for x in arrays]
        wide = [x.double() for x in arrays]
        call = lambda x, **more: paged_attention(*x, table, lengths, **options, **more)  # noqa: B023, E731
        wanted, lse = call(wide, backend="reference", return_lse=True)
        alone = call(arrays, backend="native_cpu")
        out, own = call(arrays, backend="native_cpu", return_lse=True)
        for found, known in ((alone, wanted), (out, wanted), (own, lse)):
            assert torch.allclose(found.double(), known, rtol=bound, atol=bound), options
