"""Seeded faults of many kinds, in every layer and in ports of other makes: who is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyattn.trace import Trace
from polyattn.trace.compare import compare
from tests.trace.compare import models
from tests.trace.compare.faults import FAULTS, model_faults
from tests.trace.compare.models import Transformer, trace
from tests.trace.compare.ports import PORTS, Port

LAYERS = 3


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return trace(Transformer(layers=LAYERS), tmp_path_factory.mktemp("a") / "a.jsonl")


def named(reference: Trace, port: Trace) -> tuple[object, ...]:
    verdict = compare(reference, port)
    if verdict.culprit is None:
        return verdict.equal, verdict.reasons
    assert verdict.exit_code == 1
    return verdict.culprit.module, verdict.culprit.kind


def test_the_culprit_is_exact(reference: Trace, tmp_path: Path, monkeypatch) -> None:
    """Every fault in every layer, in a port that sums in another order."""
    monkeypatch.setattr(models, "CHUNKS", 2)
    wrong, count = [], 0
    for fault in FAULTS:
        for layer in range(LAYERS):
            model = Transformer(layers=LAYERS)
            part, kind = fault.seed(model.blocks[layer])
            expected = (f"blocks.{layer}.{part}".rstrip("."), kind)
            found = named(reference, trace(model, tmp_path / "b.jsonl"))
            count += 1
            wrong += [] if found == expected else [(fault.name, layer, found)]
    for at in range(4):
        model = Transformer(layers=LAYERS)
        name, seed, module, kind = model_faults(model)[at]
        seed()
        found = named(reference, trace(model, tmp_path / "b.jsonl"))
        count += 1
        wrong += [] if found == (module, kind) else [(name, "", found)]
    assert count == len(FAULTS) * LAYERS + 4 >= 100
    assert len(wrong) <= 0.02 * count, wrong


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("port", PORTS, ids=lambda port: port.name)
def test_a_clean_port_is_not_flagged(
    port: Port, chunks: int, reference: Trace, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(models, "CHUNKS", chunks)
    model = Transformer(layers=LAYERS)
    port.change(model)
    made = trace(model, tmp_path / "b.jsonl", rename=port.rename, weights=port.weights)
    verdict = compare(reference, made)
    assert verdict.equal is True and verdict.exit_code == 0, str(verdict)
    assert verdict.coverage.compared >= 0.75 * verdict.coverage.reference
    assert {row.verdict for row in verdict.rows} <= {"same", "extra", "missing", "not compared"}


def test_the_culprit_is_exact_in_ports_of_another_make(reference: Trace, tmp_path: Path) -> None:
    """Each port with every third fault, each in another layer; the names are the port's."""
    wrong, count = [], 0
    for number, port in enumerate(PORTS):
        for at, fault in enumerate(FAULTS):
            if (at + number) % 3 or port.skips(fault.name):
                continue
            layer = (at + number) // 3 % LAYERS
            model = Transformer(layers=LAYERS)
            part, kind = fault.seed(model.blocks[layer])
            port.change(model)
            made = trace(model, tmp_path / "b.jsonl", rename=port.rename, weights=port.weights)
            found = named(reference, made)
            count += 1
            right = found == (port.culprit(layer, part), kind)
            wrong += [] if right else [(port.name, fault.name, layer, found)]
    assert count >= 150
    assert len(wrong) <= 0.02 * count, wrong


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("seed", [3, 4])
def test_other_sizes_and_seeds(seed: int, dim: int, tmp_path: Path, monkeypatch) -> None:
    made = trace(Transformer(seed, 2, dim), tmp_path / "a.jsonl")
    monkeypatch.setattr(models, "CHUNKS", 2)
    assert compare(made, trace(Transformer(seed, 2, dim), tmp_path / "b.jsonl")).equal is True
    wrong = []
    for fault in FAULTS[seed % 2 :: 4]:
        model = Transformer(seed, 2, dim)
        part, kind = fault.seed(model.blocks[1])
        found = named(made, trace(model, tmp_path / "b.jsonl"))
        wrong += [] if found == (f"blocks.1.{part}".rstrip("."), kind) else [(fault.name, found)]
    assert not wrong
