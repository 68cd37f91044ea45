"""What FlashAttention's own windows are told, by a stand-in that computes what CUDA's does.

The kernel runs on CUDA alone (tests/torch/test_cuda.py); the lowering in front of it runs anywhere.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from polyattn import Causal, Window
from polyattn.backends.sdpa.torch import load_flash, lowering, operators
from polyattn.torch import attention
from polyattn.torch.admission import admit


def stand_in(
    q: Tensor, k: Tensor, v: Tensor, cu_q: None, cu_k: None, longest_q: int, longest_k: int,
    dropout: float, causal: bool, debug: bool, *, scale: float | None, window_size_left: int,
    window_size_right: int,
) -> Any:  # fmt: skip
    """FlashAttention 2: (B, T, N, H), the last query stands at the last key, -1 has no end."""
    assert (longest_q, longest_k) == (q.shape[1], k.shape[1])
    place = torch.arange(longest_q)[:, None] + longest_k - longest_q
    keys = torch.arange(longest_k)[None]
    seen = torch.ones(longest_q, longest_k, dtype=torch.bool)
    if window_size_left >= 0:
        seen &= keys >= place - window_size_left
    if window_size_right >= 0:
        seen &= keys <= place + window_size_right
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("btnh,bsnh->bnts", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    scores = scores.masked_fill(~seen, -math.inf)
    out = torch.einsum("bnts,bsnh->btnh", scores.softmax(-1), v)
    return out, scores.logsumexp(-1), None, None, None


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(("rows", "keys"), [(1, 40), (7, 7), (20, 33), (40, 40)])
@pytest.mark.parametrize(
    "mask", [Window(3, 0), Window(0, 0), Window(17, 5), Window(None, 4), Window(9), Causal()]
)
def test_windows_are_what_they_are(
    mask: Any, rows: int, keys: int, kv_heads: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "flash_forward", stand_in)
    monkeypatch.setattr(lowering, "is_readable", lambda x: False)
    shapes = (2, rows, 4, 16), (2, keys, kv_heads, 16), (2, keys, kv_heads, 16)
    q, k, v = (torch.randn(shape) for shape in shapes)
    if layout == "BNTH":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    call = admit(q, k, v, mask=mask, layout=layout, return_lse=True)
    if call.problem.mask is None or call.problem.mask.structure.kind != "Window":
        pytest.skip("at these lengths it is no window")
    problem = call.problem.with_(device="cuda", arch="sm_90")
    out, lse = load_flash()(problem, {})(q, k, v, call.mask)
    exact, exact_lse = attention(
        q, k, v, mask=mask, layout=layout, return_lse=True, backend="reference"
    )
    assert torch.allclose(out, exact, atol=1e-5)
    assert torch.allclose(lse, exact_lse, atol=1e-5)
