"""Weights of modules that are not called: blamed only where something may come of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.hooks import assert_same_activations, trace
from polyattn.trace.compare import Verdict, compare


class Inner(nn.Module):
    """Holds a layer that it may read the weight of, and one that nobody calls."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.up, self.head, self.reads = nn.Linear(8, 8), nn.Linear(8, 8), reads

    def forward(self, x: Any) -> Any:
        x = self.up(x)
        return nn.functional.linear(x, self.head.weight) if self.reads else x


class Model(nn.Module):
    """A block, an activation, and a pooler that never runs."""

    def __init__(self, act: nn.Module | None = None, reads: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.act, self.down = Inner(reads), act or nn.GELU(), nn.Linear(8, 8)
        self.pooler = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.down(self.act(self.inner(x)))


X = torch.linspace(-2, 2, 32).view(4, 8)


def other(module: nn.Linear) -> None:
    with torch.no_grad():
        module.weight.mul_(-1.5)
        module.bias.add_(1)


def verdict_of(reference: nn.Module, port: nn.Module) -> Verdict:
    try:
        return assert_same_activations(reference, port, X)
    except AssertionError as error:
        return error.verdict  # type: ignore[attr-defined, no-any-return]


def said(verdict: Verdict) -> list[str]:
    return [note for note in verdict.notes if "not called" in note]


def test_it_does_not_hide_the_fault() -> None:
    port = Model(nn.GELU(approximate="tanh"))
    other(port.pooler)
    verdict = verdict_of(Model(), port)
    assert verdict.culprit is not None and verdict.culprit.module == "act"
    assert verdict.culprit.others == ()
    (note,) = said(verdict)
    assert note.endswith("differ, to no effect here: pooler.weight, pooler.bias")


def test_without_a_fault_it_is_a_note() -> None:
    port = Model()
    other(port.pooler)
    verdict = verdict_of(Model(), port)
    assert verdict.equal is True and len(said(verdict)) == 1
    assert verdict.guards["weights"].holds is False


def test_a_weight_that_the_code_around_reads_is_blamed() -> None:
    port = Model(reads=True)
    other(port.inner.head)
    other(port.pooler)
    verdict = verdict_of(Model(reads=True), port)
    culprit = verdict.culprit
    assert culprit is not None
    assert (culprit.module, culprit.kind, culprit.tensor) == ("inner.head", "parameter", "weight")
    assert culprit.others == ("inner.head.bias",)
    assert "pooler.weight" in said(verdict)[0]


def test_a_weight_that_runs_is_blamed_before_any_that_does_not() -> None:
    port = Model()
    other(port.pooler)
    other(port.down)
    culprit = verdict_of(Model(), port).culprit
    assert culprit is not None and (culprit.module, culprit.kind) == ("down", "parameter")
    assert culprit.others == ("down.bias",)


def test_other_inputs_come_of_no_weight(tmp_path: Path) -> None:
    port = Model()
    other(port.pooler)
    for name, model, x in (("a", Model(), X), ("b", port, X + 1)):
        with torch.no_grad(), trace(model, tmp_path / f"{name}.jsonl"):
            model(x)
    verdict = compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert verdict.equal is None and verdict.guards["inputs"].holds is False


def test_where_nothing_around_it_was_recorded_it_may_have_run(tmp_path: Path) -> None:
    """Of a few layers only: nobody knows whether the others were called."""
    port = Model()
    other(port.inner.up)
    for name, model in (("a", Model()), ("b", port)):
        with torch.no_grad(), trace(model, tmp_path / f"{name}.jsonl", layers="down"):
            model(X)
    culprit = compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl").culprit
    assert culprit is not None and (culprit.module, culprit.kind) == ("inner.up", "parameter")


def test_in_low_precision_too() -> None:
    """Nothing is decided there before the modules are isolated, and all of them agree."""
    reference, port = Model().bfloat16(), Model().bfloat16()
    other(port.pooler)
    x = X.bfloat16()
    assert assert_same_activations(reference, port, x).equal is True
    port.inner.reads = reference.inner.reads = True
    other(port.inner.head)
    with pytest.raises(AssertionError, match=r"the weight 'weight' of 'inner\.head'"):
        assert_same_activations(reference, port, x)
