"""How tensors lie where torch's CUDA kernels get them: seen on a processor, too."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from polyattn.backends.sdpa.torch.cuda_memory import (
    comes_in_like,
    in_vectors,
    in_vectors_traced,
    rows_in_memory,
)

SHAPE = (2, 3, 4, 16)


def halves(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.bfloat16)


WIDE = halves(4, 5, 6, 27)
PLACED: dict[str, tuple[Tensor, bool]] = {
    "as it is": (halves(*SHAPE), True),
    "heads third": (halves(2, 4, 3, 16).transpose(1, 2), True),
    "one head for all": (halves(2, 1, 4, 16).expand(SHAPE), True),
    "a part of wide rows": (halves(2, 3, 4, 32)[..., 8:24], True),
    "rows of 27": (WIDE[:2, :3, :4, :16], False),
    "one entry further": (halves(2, 3, 4, 32)[..., 1:17], False),
    "one row, spaced oddly": (WIDE[:1, :1, :1, :16], True),
    "every other entry": (halves(2, 3, 4, 32)[..., ::2], False),
    "not where memory begins": (halves(1 + 2 * 3 * 4 * 16)[1:].view(SHAPE), False),
}


@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("traced", [False, True])
def test_rows_begin_at_vectors(name: str, traced: bool) -> None:
    x, fine = PLACED[name]
    if traced:
        lay = in_vectors_traced()
        torch.compiler.reset()
        out = torch.compile(lambda x: lay(x), fullgraph=True, backend="aot_eager")(x)
    else:
        out = in_vectors(x)
    assert torch.equal(out, x)
    assert out.stride(-1) == 1
    assert all(stride % 8 == 0 for stride in out.stride()[:-1])
    assert (out.data_ptr() == x.data_ptr()) is fine


def test_a_mask_that_broadcasts_has_rows() -> None:
    mask = torch.randn(1, 1, 5, 1).expand(2, 1, 5, 7)
    found = rows_in_memory(mask)
    assert torch.equal(found, mask)
    assert found.stride(-1) == 1
    assert rows_in_memory(found) is found


class Told(torch.autograd.Function):
    """A kernel whose backward pass says how what comes in lies in memory."""

    strides: tuple[int, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Told.strides = grad.stride()
        return grad


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("how", ["ones", "contiguous", "heads third", "alike"])
def test_gradients_come_in_as_the_output_lies(how: str, turned: bool) -> None:
    x = torch.randn(2, 4, 3, 16) if turned else torch.randn(SHAPE)
    x = x.transpose(1, 2) if turned else x
    x = x.detach().requires_grad_()
    out = comes_in_like(Told.apply(x))
    grad = {
        "ones": torch.ones(()).expand(SHAPE),
        "contiguous": torch.randn(SHAPE),
        "heads third": torch.randn(2, 4, 3, 16).transpose(1, 2),
        "alike": torch.empty_like(out).normal_(),
    }[how]
    out.backward(grad)
    assert Told.strides == out.stride()
    assert torch.equal(x.grad, grad)
