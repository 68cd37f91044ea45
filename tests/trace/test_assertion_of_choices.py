"""What a right port's own code hands on may differ by a choice that rounding made."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.hooks import assert_same_activations


class Scores(nn.Module):
    """As good as one another, but for the `rounding` of every second."""

    def __init__(self, rounding: float) -> None:
        super().__init__()
        self.rounding = rounding

    def forward(self, x: Any) -> Any:
        return torch.ones_like(x[..., 0]) + self.rounding * (torch.arange(x.shape[1]) % 2)


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Any) -> Any:
        return self.factor * x


class Detector(nn.Module):
    """Decodes the best proposals."""

    def __init__(self, rounding: float = 0.0, handed: float = 1.0, out: float = 2.0) -> None:
        super().__init__()
        self.scores, self.decoder, self.out = Scores(rounding), Times(3.0), Times(out)
        self.handed = handed

    def forward(self, x: Any) -> Any:
        best = self.scores(x).topk(8).indices[..., None].expand(-1, -1, x.shape[-1])
        return self.out(self.decoder(self.handed * x.gather(1, best)))


ROUNDING = 2.0**-23
PROPOSALS = torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(1))


def test_proposals_that_rounding_chose_are_no_fault() -> None:
    reference, port = Detector(), Detector(ROUNDING)
    assert not torch.allclose(reference(PROPOSALS), port(PROPOSALS), atol=0.1)
    assert assert_same_activations(reference, port, PROPOSALS).equal
    with pytest.raises(AssertionError, match="what it hands to 'decoder'"):
        assert_same_activations(reference, port, PROPOSALS, isolate=False)


@pytest.mark.parametrize(
    ("fault", "said"),
    [({"handed": 1.01}, "what it hands to 'decoder'"), ({"out": 2.02}, "the output of 'out'")],
)
def test_a_fault_beside_such_a_choice_is_named(fault: dict[str, float], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        assert_same_activations(Detector(), Detector(ROUNDING, **fault), PROPOSALS)


def test_without_rounding_another_choice_is_a_fault() -> None:
    class Turned(Detector):
        def forward(self, x: Any) -> Any:
            best = 23 - self.scores(x).topk(8).indices[..., None].expand(-1, -1, x.shape[-1])
            return self.out(self.decoder(x.gather(1, best)))

    with pytest.raises(AssertionError, match="what it hands to 'decoder'"):
        assert_same_activations(Detector(), Turned(), PROPOSALS)
