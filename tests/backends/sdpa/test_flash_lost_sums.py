"""Gradients of the CPU flash kernel in rows whose every score is ``finfo.min``: all keys alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyattn import Causal, Mask
from polyattn.backends.sdpa.torch import lost_sums
from polyattn.masks.biases import DenseBias
from polyattn.torch import attention, scaled_dot_product_attention

B, T, S, N, K, H = 2, 40, 37, 4, 2, 8


def call(
    backend: str, dtype: torch.dtype, mask: Mask | None, lse: bool, heads: int, rows: int = T
) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((rows, N), (S, heads), (S, heads))
    inputs = [torch.randn(B, t, n, H, dtype=dtype).requires_grad_() for t, n in sizes]
    bias = torch.randn(B, 1, rows, S, dtype=dtype)
    bias[0, :, 4] = bias[1, :, 3] = torch.finfo(dtype).min
    bias[0, :, 5] = float("-inf")
    got = attention(*inputs, mask=mask, bias=DenseBias(bias), return_lse=lse, backend=backend)
    values = got if lse else (got,)
    seen = [x.masked_fill(x.isinf(), 0) for x in values]
    torch.manual_seed(1)
    return list(torch.autograd.grad(seen, inputs, [torch.randn_like(x) for x in seen]))


@pytest.mark.parametrize(("heads", "rows"), [(N, T), (K, T), (K, 6)])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("mask", [None, Causal("top_left")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tied_keys_share_the_gradient(
    dtype: torch.dtype, mask: Mask | None, lse: bool, heads: int, rows: int
) -> None:
    ours = call("sdpa_flash", dtype, mask, lse, heads, rows)
    theirs = call("reference", dtype, mask, lse, heads, rows)
    near = 0.06 if dtype == torch.bfloat16 else 2e-5
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=near, atol=near)


@pytest.mark.parametrize("shape", [(1, 16, 4), (1, 1, 16, 4), (2, 1, 1, 16, 4)])
def test_the_drop_in_in_all_its_dims(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape).requires_grad_() for _ in range(3))
    mask = torch.zeros(16, 1)
    mask[2] = torch.finfo(torch.float32).min
    weights = torch.randn(shape)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = (q @ k.mT) / 2 + mask
    expected = torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v), weights)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), weights), expected)


def test_under_transforms() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 16, N, H), torch.randn(1, S, K, H), torch.randn(1, S, K, H)
    bias = torch.randn(16, S)
    bias[2] = torch.finfo(torch.float32).min

    def loss(q: Tensor, backend: str) -> Tensor:
        out = attention(q, k, v, mask=Causal(), bias=DenseBias(bias), backend=backend)
        return out.square().sum()

    ours = torch.vmap(torch.func.grad(loss), (0, None))(q, "sdpa_flash")
    theirs = torch.stack([torch.func.grad(loss)(x, "reference") for x in q])
    torch.testing.assert_close(ours, theirs)
    whole = torch.func.grad(lambda q: torch.vmap(loss, (0, None))(q, "sdpa_flash").sum())(q)
    torch.testing.assert_close(whole, theirs)


def test_the_kernel_runs_where_no_gradient_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("all scores at once")

    monkeypatch.setattr(lost_sums, "_defined", refused)
    q = torch.randn(1, 16, 1, 4, requires_grad=True)
    bias = torch.zeros(16, 16)
    bias[2] = torch.finfo(torch.float32).min
    out = attention(q, q, q, bias=DenseBias(bias), backend="sdpa_flash")
    out[:, 3:].sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="all scores"):
        out.sum().backward()
