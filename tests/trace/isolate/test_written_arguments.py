"""isolate: what a module writes into its arguments is judged and fed like what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.hooks import isolate

Act = Callable[[Any], Any]


class Write(nn.Module):
    """Returns nothing: what it computes is in a buffer of the caller's."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), act

    def forward(self, x: Any, out: Any) -> None:
        out.copy_(self.act(self.linear(x)))


class Block(nn.Module):
    def __init__(self, act: Act) -> None:
        super().__init__()
        self.attn, self.head = Write(act), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        out = torch.zeros_like(x)
        self.attn(x, out)
        return self.head(out * 2) + x


def model(*acts: Act) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*map(Block, acts)).bfloat16().eval()


X = torch.linspace(-2, 2, 32).view(4, 8).bfloat16()


def test_each_one_that_is_wrong_is_named() -> None:
    reference = model(torch.tanh, torch.tanh, torch.tanh)
    verdict = isolate(model(torch.tanh, torch.sigmoid, torch.sigmoid), reference, X)
    culprit = verdict.culprit
    assert culprit is not None and (culprit.module, culprit.kind) == ("1.attn", "output")
    assert culprit.tensor == "args[1]" and culprit.others == ("2.attn",)
    inside = {row.module: row.error_in for row in verdict.rows}
    assert inside["1.head"] == 0  # computed from what the reference's buffer held
    assert isolate(model(torch.tanh, torch.tanh, torch.tanh), reference, X).equal is True


class Scaled(nn.Module):
    """Returns numbers that are no tensors as well."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 8), factor

    def forward(self, x: Any) -> tuple[Any, float, int]:
        y = self.linear(x)
        return y, self.factor * float(y.float().abs().sum()), 3


class Uses(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scaled, self.last = Scaled(factor), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        y, scale, count = self.scaled(x)
        assert type(scale) is float and type(count) is int
        return self.last(y / scale * count)


def test_numbers_that_are_returned_are_fed() -> None:
    reference, port = Uses(1.0).bfloat16(), Uses(2.0).bfloat16()
    verdict = isolate(port, reference, X)
    assert verdict.culprit is not None and verdict.culprit.module == "scaled"
    assert verdict.culprit.tensor == "out[1]" and verdict.culprit.others == ()
    assert isolate(Uses(1.0).bfloat16(), reference, X).equal is True
