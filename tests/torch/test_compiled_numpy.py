"""NumPy's numbers and arrays in compiled calls: what eager calls take of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from polyattn import BlockMap, Causal, Dense, LeftPadding, Padding, PrefixLM, Segments
from polyattn.torch import attention

IDS, LENGTHS = np.array([0, 0, 1, 1, 2, 2]), np.array([3, 6])
SEEN = np.tril(np.ones((6, 6), bool))
MASKS = {
    "dense": Dense(SEEN),
    "segments": Segments(IDS),
    "segments of each": Segments(np.stack([IDS, IDS[::-1]])),
    "padding": Padding(kv_lengths=LENGTHS.astype(np.int32)) & Causal(),
    "left padding": LeftPadding(kv_starts=np.array([1, 0])),
    "prefix": PrefixLM(LENGTHS),
    "blocks": BlockMap(3, 3, np.zeros((1, 1, 2, 1), np.int32), np.ones((1, 1, 2), np.int32)),
}


def compared(function: Any, **options: Any) -> None:
    torch._dynamo.reset()
    q = torch.randn(2, 6, 4, 16)
    got = torch.compile(function, backend="eager", **options)(q)
    torch.testing.assert_close(got, function(q))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_arrays_in_masks(name: str, fullgraph: bool) -> None:
    mask = MASKS[name]
    compared(lambda q: attention(q, q, q, mask=mask), fullgraph=fullgraph)


def test_masks_that_are_made_of_arrays_in_the_compiled_function() -> None:
    compared(lambda q: attention(q, q, q, mask=Dense(SEEN) & Segments(IDS)))


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64])
def test_numbers(name: str, kind: Any) -> None:
    number: Any = kind(2)
    compared(lambda q: attention(q, q, q, **{name: number}))
    compared(lambda q: attention(q, q, q, **{name: kind(1) / np.sqrt(16)}))


def test_a_number_in_a_full_graph_says_what_to_pass() -> None:
    with pytest.raises(Exception, match="expected Python's: float"):
        compared(lambda q: attention(q, q, q, scale=1 / np.sqrt(16)), fullgraph=True)


def test_another_number_is_not_taken_for_the_first() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, scale: attention(q, q, q, scale=scale), backend="eager")
    q = torch.randn(2, 6, 4, 16)
    for scale in (np.float64(0.5), np.float64(2.0)):
        torch.testing.assert_close(compiled(q, scale), attention(q, q, q, scale=scale))
