"""Arguments that a module changes in place: recorded as they were left, and blamed far away."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from polyattn.hooks import assert_same_activations, compare, trace
from polyattn.trace import read
from polyattn.trace.compare import Verdict


class Add(nn.Module):
    """Returns its sum with what it computes; in a port perhaps in place."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(8, 8), in_place

    def forward(self, x: Tensor) -> Tensor:
        added = self.linear(x).tanh()
        if self.in_place:
            x += added
            return x
        return x + added


class Skips(nn.Module):
    """Uses what it gave to `add` again, after another module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.add = nn.Linear(8, 8), Add()
        self.middle, self.last = nn.Linear(8, 8), nn.Bilinear(8, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x)
        h = self.middle(self.add(kept))
        out: Tensor = self.last(h, kept)
        return out


X = torch.linspace(-1, 1, 32).view(4, 8)


def compared(reference: nn.Module, port: nn.Module, tmp_path: Path) -> Verdict:
    for model, name in ((reference, "a"), (port, "b")):
        with torch.no_grad(), trace(model, tmp_path / f"{name}.jsonl", overwrite=True):
            model(X.clone())
    return compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl")


@pytest.fixture
def model() -> Skips:
    torch.manual_seed(0)
    return Skips().eval()


def test_the_module_that_changed_it_is_named(model: Skips, tmp_path: Path) -> None:
    port = copy.deepcopy(model)
    port.add.in_place = True
    verdict = compared(model, port, tmp_path)
    assert verdict.culprit is not None and verdict.culprit.module == "add", str(verdict)
    assert verdict.culprit.at == "last" and verdict.culprit.tensor == "args[0]"
    assert "in place" in str(verdict)
    back = compared(port, model, tmp_path)  # and the one that should have, and did not
    assert back.culprit is not None and back.culprit.module == "add"


def test_a_change_in_place_that_nobody_sees_is_none(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    port = copy.deepcopy(reference)
    port[1].inplace = True
    verdict = compared(reference, port, tmp_path)
    assert verdict.equal is True, str(verdict)
    records = read(tmp_path / "b.jsonl").records
    left = [one for one in records if one.phase == "out" and one.tensor == "args[0]"]
    assert [one.module for one in left] == ["1"] and left[0].same is not None
    port[2] = nn.Sequential(port[2], nn.Tanh())  # a bug elsewhere is not charged to it
    found = compared(reference, port, tmp_path).culprit
    assert found is None or found.module != "1"


def test_both_in_place(model: Skips, tmp_path: Path) -> None:
    model.add.in_place = True
    assert compared(model, copy.deepcopy(model), tmp_path).equal is True


def test_an_output_beside_a_change_in_place_says_so(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.linear = nn.ReLU(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(self.act(x)) + x
            return out

    torch.manual_seed(0)
    reference = Block()
    port = copy.deepcopy(reference)
    port.act.inplace = True
    verdict = compared(reference, port, tmp_path)
    assert verdict.culprit is not None and verdict.culprit.module == ""
    assert "args[0] is changed in place, and not in the reference" in str(verdict)


class Write(nn.Module):
    """Returns nothing: what it computes is in a buffer of the caller's."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), torch.sigmoid if wrong else torch.tanh

    def forward(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self.act(self.linear(x)))


class Hands(nn.Module):
    """Hands a buffer that is filled with anything to `write`, perhaps as a keyword."""

    def __init__(self, wrong: bool = False, held: float = 0.0, keyword: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write, self.last = Write(wrong), nn.Linear(8, 8)
        self.held, self.keyword = held, keyword

    def forward(self, x: Tensor) -> Tensor:
        out = torch.full_like(x, self.held)
        if self.keyword:
            self.write(x, out=out)
        else:
            self.write(x, out)
        found: Tensor = self.last(out)
        return found


@pytest.mark.parametrize("keyword", [False, True])
def test_what_both_write_is_compared(tmp_path: Path, keyword: bool) -> None:
    verdict = compared(Hands(), Hands(wrong=True, keyword=keyword), tmp_path)
    culprit = verdict.culprit
    assert culprit is not None and (culprit.module, culprit.kind) == ("write", "output")
    assert culprit.tensor == ("kwargs.out" if keyword else "args[1]") and culprit.between == ()
    assert "changed in place" not in culprit.evidence  # on one side only
    assert compared(Hands(), Hands(keyword=keyword), tmp_path).equal is True


def test_a_model_that_only_writes() -> None:
    given = (X, torch.zeros(4, 8))
    right, wrong = Hands().write, Hands(wrong=True).write
    assert assert_same_activations(right, right, given).equal is True
    with pytest.raises(AssertionError, match="the output of the model") as caught:
        assert_same_activations(right, wrong, given)
    assert caught.value.verdict.culprit.tensor == "args[1]"  # type: ignore[attr-defined]


def test_what_a_buffer_held_before_is_nobodys_fault(tmp_path: Path) -> None:
    """Whatever `torch.empty` found there: both write over it."""
    verdict = compared(Hands(), Hands(held=3.0), tmp_path)
    assert verdict.equal is True, str(verdict)
    row = next(row for row in verdict.rows if row.module == "write")
    assert row.verdict == "same" and row.error_out == 0


def test_what_is_added_to_another_buffer_is_the_callers_fault(tmp_path: Path) -> None:
    """It differs before and after: the module may well be right."""
    reference, port = Skips(), Skips()
    port.load_state_dict(reference.state_dict())
    reference.add.in_place = port.add.in_place = True
    port.first = Doubled(port.first)
    verdict = compared(reference, port, tmp_path)
    assert verdict.culprit is not None and verdict.culprit.module == "first", str(verdict)


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = inner.weight, inner.bias

    def forward(self, x: Tensor) -> Tensor:
        return 2 * nn.functional.linear(x, self.weight, self.bias)
