"""Gradients of rows whose every score is as good as infinite: a mask of ``finfo.min`` alone.

Their lse is that minimum, whatever the number of keys, and the probabilities are all alike.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyattn.masks.biases import DenseBias
from polyattn.native import module
from polyattn.selection.registry import Available
from polyattn.torch import attention

if not isinstance(module.status(), Available):
    pytest.skip("the extension is not built", allow_module_level=True)

from polyattn.backends.native_cpu.torch import gradients

B, T, S, N, K, H = 2, 5, 6, 4, 2, 16


def with_dead_rows(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    inputs = [torch.randn(B, t, n, H, dtype=dtype) for t, n in ((T, N), (S, K), (S, K))]
    bias = torch.randn(B, 1, T, S, dtype=dtype)
    bias[0, :, 0] = bias[1, :, 3] = torch.finfo(dtype).min
    return [x.requires_grad_() for x in inputs], bias.requires_grad_()


def gradients_of(backend: str, dtype: torch.dtype, layout: str, lse: bool) -> list[Tensor]:
    inputs, bias = with_dead_rows(dtype)
    given = [x.transpose(1, 2) if layout == "BNTH" else x for x in inputs]
    got = attention(*given, bias=DenseBias(bias), layout=layout, return_lse=lse, backend=backend)
    values = got if lse else (got,)
    torch.manual_seed(1)
    come = [torch.randn(B, T, N, H, dtype=dtype), torch.randn(B, N, T)]
    come[0] = come[0].transpose(1, 2) if layout == "BNTH" else come[0]
    return list(torch.autograd.grad(values, (*inputs, bias), come[: len(values)]))


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_of_a_row_without_a_favourite_are_alike(
    dtype: torch.dtype, layout: str, lse: bool
) -> None:
    ours = gradients_of("native_cpu", dtype, layout, lse)
    theirs = gradients_of("reference", dtype, layout, lse)
    near = 1e-5 if dtype == torch.float32 else 0.05
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=near, atol=near)


def test_compiled_and_under_transforms() -> None:
    inputs, bias = with_dead_rows(torch.float32)
    q, k, v = (x.detach() for x in inputs)
    added = DenseBias(bias.detach())

    def loss(q: Tensor, backend: str) -> Tensor:
        return attention(q, k, v, bias=added, backend=backend).square().sum()

    expected = torch.func.grad(loss)(q, "reference")
    torch.testing.assert_close(torch.func.grad(loss)(q, "native_cpu"), expected)
    torch._dynamo.reset()
    leaf = q.clone().requires_grad_()
    torch.compile(loss, backend="aot_eager", fullgraph=True)(leaf, "native_cpu").backward()
    torch.testing.assert_close(leaf.grad, expected)


def test_the_kernel_runs_where_no_gradient_comes_in_to_such_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("all scores at once, though nothing comes in")

    monkeypatch.setattr(gradients, "defined_gradients", refused)
    inputs, bias = with_dead_rows(torch.float32)
    out = attention(*inputs, bias=DenseBias(bias), backend="native_cpu")
    alive = torch.ones(B, T, 1, 1)
    alive[0, 0] = alive[1, 3] = 0
    (out * alive).sum().backward()
    with pytest.raises(AssertionError, match="all scores"):
        attention(*inputs, bias=DenseBias(bias), backend="native_cpu").sum().backward()
