"""torch's default dtype is the program's, and nothing of ours depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from polyattn import Causal, DenseBias, Padding, Window
from polyattn.masks import Dense
from polyattn.torch import QuantizedCache, attention, quantize_kv
from polyattn.torch import scaled_dot_product_attention as sdpa

BACKENDS = ("sdpa_flash", "sdpa_math", "portable", "flex", "native_cpu", "reference")
Q, K, V = torch.randn(3, 2, 20, 4, 16, dtype=torch.float32)
BIAS = torch.randn(4, 20, 20, dtype=torch.float32)
SHOWN = torch.ones(20, 20, dtype=torch.bool).tril(3)
SINKS = torch.randn(4, dtype=torch.float32)
CALLS: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"mask": Causal()},
    "shown": {"mask": Dense(SHOWN)},
    "lengths": {"mask": Padding(kv_lengths=[3, 20]) & Window(left=7)},
    "bias": {"bias": DenseBias(BIAS)},
    "sinks": {"sinks": SINKS, "mask": Causal()},
}


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    yield request.param
    torch.set_default_dtype(before)


def results(dtype: torch.dtype, trains: bool, **options: Any) -> list[torch.Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_(trains) for x in (Q, K, V)]
    out = attention(*leaves, **options)
    return [out, *(torch.autograd.grad(out.double().sin().sum(), leaves) if trains else ())]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_give_the_same_bits(default: torch.dtype, backend: str, trains: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for name, options in CALLS.items():
            expected = results(dtype, trains, backend=backend, **options)
            torch.set_default_dtype(default)
            found = [
                results(dtype, trains, backend=backend, **options),
                results(dtype, trains, backend=backend, **options),
            ]
            torch.set_default_dtype(torch.float32)
            for ours in found:
                assert all(map(torch.equal, ours, expected)), (name, dtype)


def test_so_does_the_drop_in(default: torch.dtype) -> None:
    arrays = [x.transpose(1, 2) for x in (Q, K, V)]
    for options in ({}, {"attn_mask": SHOWN}, {"attn_mask": BIAS}, {"is_causal": True}):
        for trains in (False, True):
            leaves = [x.detach().requires_grad_(trains) for x in arrays]
            expected = sdpa(*leaves, **options)
            torch.set_default_dtype(default)
            assert torch.equal(sdpa(*leaves, **options), expected)
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_cache_of_codes_has_scales_of_float32(default: torch.dtype, dtype: Any) -> None:
    torch.set_default_dtype(default)
    cache = QuantizedCache(2, 4, 16, dtype=dtype, block_size=8)
    for begin in range(0, 20, 3):
        rows = slice(begin, begin + 3)
        cache.append(K.detach()[:, rows], V.detach()[:, rows])
    codes, scales = quantize_kv(K.detach(), block_size=8, dtype=dtype)
    assert cache.key_scales.dtype == torch.float32
    assert torch.equal(cache.keys.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(cache.key_scales, scales)
    assert cache.attention(Q.detach()[:, :1]).dtype == torch.float32
