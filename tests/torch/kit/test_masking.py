"""What is written out by a shorter way is what the masks themselves say, entry by entry."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from polyattn import BlockMap, Causal, Packed, Padding, PrefixLM, Segments, Window
from polyattn.errors import InvalidProblem
from polyattn.masks import Mask
from polyattn.torch import attention
from polyattn.torch.kit.masking import (
    Dims,
    bind_mask,
    expand_blocks,
    four_dims,
    grid,
    materialise,
    visible,
)

CPU = torch.device("cpu")
DIMS = Dims(batch=3, heads=2, kv_heads=2, q_len=17, kv_len=29)
PACKED = Packed([0, 5, 5, 17], [0, 9, 12, 29])
LENGTHS = [0, 29, 7]


def blocks(batch: int, heads: int) -> BlockMap:
    generator = torch.Generator().manual_seed(2)
    shape = (batch, heads, 3, 4)
    order = torch.rand(shape, generator=generator).argsort(-1).int()
    counts = torch.randint(0, 5, shape[:-1], generator=generator).int()
    return BlockMap(8, 8, order, counts)


MASKS: dict[str, Any] = {
    "keys": lambda: Padding(kv_lengths=LENGTHS),
    "keys and rows": lambda: Padding(q_lengths=[3, 0, 17], kv_lengths=LENGTHS),
    "rows": lambda: Padding(q_lengths=[3, 0, 17]),
    "nothing": Padding,
    "nothing, causal": lambda: Padding() & Causal(),
    "not nothing": lambda: ~Padding(),
    "not keys": lambda: ~Padding(kv_lengths=LENGTHS),
    "keys, causal": lambda: Padding(kv_lengths=LENGTHS) & Causal(),
    "keys of packed rows": lambda: PACKED & Padding(kv_lengths=[3, 0, 12]),
    "no keys of packed rows": lambda: PACKED & ~Padding(kv_lengths=[3, 0, 12]),
    "blocks": lambda: blocks(1, 1),
    "blocks of each": lambda: blocks(3, 2),
    "blocks in a window": lambda: blocks(1, 2) & Window(5),
}


def entry_by_entry(mask: Mask, dims: Dims) -> Any:
    return four_dims(expand_blocks(mask, dims.kv_len).allows(grid(mask, dims, CPU)))


@pytest.mark.parametrize("name", MASKS)
def test_dense_is_what_the_mask_says(name: str) -> None:
    mask = bind_mask(MASKS[name](), CPU)
    dims = DIMS._replace(batch=1) if "packed" in name else DIMS
    full = (dims.batch, dims.heads, dims.q_len, dims.kv_len)
    found = materialise(mask, dims, CPU)
    assert torch.equal(found.expand(full), entry_by_entry(mask, dims).expand(full))
    view = visible(mask, dims, CPU)
    assert torch.equal(
        view.empty.expand((*full[:3], 1)), ~found.any(-1, True).expand((*full[:3], 1))
    )
    seen = found.expand(full).any(2).unsqueeze(-1)
    assert torch.equal(view.seen.expand(seen.shape), seen)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64], ids=str)
@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["NumPy", "torch"])
@pytest.mark.parametrize("backend", ["native_cpu", "sdpa_flash", "reference"])
def test_unsigned_integers_are_integers(dtype, make, backend):
    q, ids = torch.randn(2, 6, 2, 8), np.repeat([[0, 0, 1, 1, 2, 2]], 2, 0)

    def out(dtype):
        given = [make(np.array(x, dtype)) for x in ([3, 4], ids, [0, 2, 6])]
        lengths, segments, offsets = given
        rows = Padding(kv_lengths=lengths) & Segments(segments, segments)
        whole = attention(q, q, q, mask=rows, backend=backend)
        packed = attention(*[q[0]] * 3, mask=Packed(offsets), layout="packed", backend=backend)
        return whole, packed, attention(q, q, q, mask=PrefixLM(lengths), backend=backend)

    for got, expected in zip(out(dtype), out(np.int64), strict=True):
        torch.testing.assert_close(got, expected)


def test_unsigned_lengths_past_all_keys_are_refused():
    q, lengths = torch.randn(1, 6, 2, 8), np.array([2**64 - 1], np.uint64)
    with pytest.raises(InvalidProblem, match="expected 0 to 6"):
        attention(q, q, q, mask=Padding(kv_lengths=lengths))
