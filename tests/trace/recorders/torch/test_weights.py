"""Fingerprints of weights, remembered while a model's copies are traced."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.trace.recorders.torch import weights
from polyattn.trace.recorders.torch.weights import remembered_fingerprints, weight_fingerprints


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The weights whose fingerprints were computed."""
    found: list[Any] = []
    original = weights.weight_fingerprint

    def counted(weight: Any) -> object:
        found.append(weight)
        return original(weight)

    monkeypatch.setattr(weights, "weight_fingerprint", counted)
    return found


def test_a_copy_of_a_model_costs_nothing(computed: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4, dtype=torch.bfloat16))
    plain = weight_fingerprints(model)
    assert len(computed) == 4
    with remembered_fingerprints():
        assert weight_fingerprints(model) == plain
        assert weight_fingerprints(copy.deepcopy(model)) == plain
    assert len(computed) == 8
    assert weight_fingerprints(model) == plain and len(computed) == 12  # and forgotten after it


def test_what_changed_is_computed_anew(computed: list[Any]) -> None:
    """Also behind autograd's back, and in another shape or dtype with the same bytes."""
    model = nn.Linear(4, 4, bias=False)
    with remembered_fingerprints():
        before = weight_fingerprints(model)
        model.weight.data.view(-1)[3] = 7.0
        assert weight_fingerprints(model)["weight"]["max"] == 7.0  # type: ignore[index]
        model.weight.data = model.weight.data.T  # not contiguous: the values in their order count
        assert weight_fingerprints(model) != before
        model.weight = nn.Parameter(torch.zeros(2, 8))
        assert weight_fingerprints(model)["weight"]["shape"] == [2, 8]  # type: ignore[index]
        model.weight = nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16))
        assert weight_fingerprints(model)["weight"]["dtype"] == "bfloat16"  # type: ignore[index]
    assert len(computed) == 5


def test_weights_without_bytes_of_their_own_are_as_ever() -> None:
    model = nn.Module()
    model.one = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64).conj())
    model.two = nn.Parameter(torch.empty(3, device="meta"))
    model.three = nn.Parameter(torch.empty(0, 2))
    model.four = nn.Parameter(torch.tensor(2.0))
    expected = weight_fingerprints(model)
    assert set(expected) == {"one", "three", "four"}
    with remembered_fingerprints():
        assert weight_fingerprints(model) == expected == weight_fingerprints(model)
