"""A default device is that of new tensors, not of what a call reads of its masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn import BlockMap, Padding
from polyattn.torch import attention


@pytest.mark.parametrize("backend", ["native_cpu", "sdpa_math", "reference"])
@pytest.mark.parametrize(
    "mask",
    [
        BlockMap(4, 4, torch.zeros(1, 1, 2, 1).int(), torch.ones(1, 1, 2).int()),
        Padding(kv_lengths=torch.tensor([3, 8])),
        Padding(kv_lengths=[3, 8]),
    ],
    ids=str,
)
def test_masks_of_tensors_on_the_cpu(mask: Any, backend: str) -> None:
    q = torch.randn(2, 8, 2, 16)
    want = attention(q, q, q, mask=mask, backend="reference")
    with torch.device("meta"):
        got = attention(q, q, q, mask=mask, backend=backend)
    torch.testing.assert_close(got, want)
