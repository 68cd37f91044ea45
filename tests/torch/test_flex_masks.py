"""polyattn's masks as torch's block masks: FlexAttention computes with them what attention does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_mask, flex_attention

from polyattn import (
    BlockMap,
    Causal,
    Dense,
    InvalidProblem,
    Packed,
    Padding,
    PrefixLM,
    Segments,
    Window,
)
from polyattn.torch import attention, block_mask
from polyattn.torch.flex_masks import mask_behind

B, N, T, S = 2, 4, 70, 90
torch.manual_seed(0)
Q, K, V = torch.randn(B, N, T, 16), torch.randn(B, N, S, 16), torch.randn(B, N, S, 16)
MASKS = [
    Causal(),
    Causal("top_left") & Window(left=9),
    Window(left=3, right=4) | Causal(),
    Padding(kv_lengths=[20, 90]) & Causal(),
    Padding(q_lengths=torch.tensor([70, 3])),
    PrefixLM([5, 40]),
    Segments(torch.randint(0, 3, (B, T)), torch.randint(0, 3, (B, S))),
    BlockMap(32, 16, torch.randint(0, 6, (1, N, 3, 4)).int(), torch.full((1, N, 3), 3).int()),
    Dense(torch.rand(B, 1, T, S) > 0.5),
]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_flex_attention_computes_the_mask(mask: Any) -> None:
    made = block_mask(mask, T, S, batch=B, heads=N)
    assert made.shape == (B, N, T, S)
    assert str(mask_behind(made.mask_mod, T, S)) == str(mask)
    assert mask_behind(made.mask_mod, T, S - 1) is None
    want = attention(Q, K, V, mask=mask, layout="BNTH", backend="reference")
    out: Any = flex_attention(Q, K, V, block_mask=made)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def test_blocks_are_those_of_the_mask() -> None:
    made = block_mask(Causal() & Window(left=31), 256, 256, block_size=32)
    assert made.BLOCK_SIZE == (32, 32) and made.shape == (1, 1, 256, 256)
    assert made.kv_num_blocks.sum() + made.full_kv_num_blocks.sum() == 15
    other = block_mask(Causal(), 256, 256, block_size=(64, 128))
    assert other.BLOCK_SIZE == (64, 128)


def test_joined_with_torchs_own() -> None:
    made = block_mask(Causal(), 40, 40).mask_mod
    joined = and_masks(made, lambda b, h, q, k: k > 3)
    pairs = create_mask(joined, 1, 1, 40, 40, device="cpu")[0, 0]
    assert torch.equal(pairs, torch.ones(40, 40).tril().bool() & (torch.arange(40) > 3))
    assert mask_behind(joined, 40, 40) is None


@pytest.mark.parametrize(
    ("mask", "sizes", "text"),
    [
        (lambda b, h, q, k: q >= k, {}, "create_block_mask takes functions"),
        (torch.ones(3, 3).bool(), {}, "got mask of type Tensor"),
        (Padding(kv_lengths=[1, 2]), {}, r"expected \(1,\)"),
        (Padding(kv_lengths=[1, 2]), {"batch": 3}, r"expected \(3,\)"),
        (Dense(torch.ones(7, 7).bool()), {"batch": 2}, "broadcastable"),
        (Packed([0, 9]), {}, 'layout="packed"'),
    ],
)
def test_wrong_masks_are_clear_errors(mask: Any, sizes: Any, text: str) -> None:
    with pytest.raises(InvalidProblem, match=text):
        block_mask(mask, 9, 9, **sizes)


@pytest.mark.slow
def test_compiled_by_torch() -> None:
    compiled = torch.compile(flex_attention)
    q, k, v = torch.randn(3, 2, 4, 256, 32)
    for mask in (Causal() & Window(left=40), Padding(kv_lengths=[200, 256])):
        made = block_mask(mask, 256, 256, batch=2)
        want = attention(q, k, v, mask=mask, layout="BNTH", backend="reference")
        torch.testing.assert_close(compiled(q, k, v, block_mask=made), want, rtol=1e-4, atol=1e-5)


def test_a_function_that_wraps_ours_is_another() -> None:
    """``functools.wraps`` copies the mark of the wrapped function."""
    made = block_mask(Causal(), 16, 16).mask_mod

    @functools.wraps(made)
    def narrower(b: Any, h: Any, q: Any, k: Any) -> Any:
        return made(b, h, q, k) & (k > q - 3)

    assert mask_behind(made, 16, 16) is not None
    assert mask_behind(narrower, 16, 16) is None
