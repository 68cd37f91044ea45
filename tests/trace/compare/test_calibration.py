"""Calibration: the floor of a reference, its file, and thresholds from it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from polyattn.errors import TraceError
from polyattn.trace import Trace
from polyattn.trace.compare import Floor, compare
from polyattn.trace.compare.calibration import META, build, load, save
from tests.trace.compare import models
from tests.trace.compare.faults import FAULTS
from tests.trace.compare.models import F32, Transformer, trace

EPS = 2.0**-23


def perturbed(path: Path, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    model = Transformer(layers=2)
    for _, module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, np.ndarray):
                u = rng.uniform(-1, 1, value.shape)
                setattr(module, name, (value * (1 + EPS * u)).astype(F32))
    return trace(model, path)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Floor]:
    folder = tmp_path_factory.mktemp("floor")
    reference = trace(Transformer(layers=2), folder / "a.jsonl")
    reruns = [perturbed(folder / f"{seed}.jsonl", seed) for seed in range(3)]
    return reference, build(reference, reruns)


def test_the_floor_is_the_largest_error(calibrated: tuple[Trace, Floor]) -> None:
    reference, floor = calibrated
    assert floor.runs == 3
    found = {key: value for key, value in floor.errors.items() if key[1] == "out"}
    assert found["embed", "out", "out"] < 2 * EPS
    assert all(0 < value < 50 * EPS for value in found.values())
    assert floor.of(reference.records[0]) == 0  # the inputs are the same


def test_it_is_saved_and_loaded(calibrated: tuple[Trace, Floor], tmp_path: Path) -> None:
    _, floor = calibrated
    path = save(floor, tmp_path / "floor.json")
    assert load(path) == floor
    assert list(tmp_path.iterdir()) == [path]


def test_clean_ports_and_faults(
    calibrated: tuple[Trace, Floor], tmp_path: Path, monkeypatch
) -> None:
    reference, floor = calibrated
    path = save(floor, tmp_path / "floor.json")
    for chunks in (2, 3, 5):
        monkeypatch.setattr(models, "CHUNKS", chunks)
        clean = compare(reference, trace(Transformer(layers=2), tmp_path / "b.jsonl"), floor=path)
        assert clean.equal is True, str(clean)
    wrong = []
    for fault in FAULTS[::3]:
        model = Transformer(layers=2)
        part, kind = fault.seed(model.blocks[1])
        verdict = compare(reference, trace(model, tmp_path / "b.jsonl"), floor=floor)
        found = verdict.culprit and (verdict.culprit.module, verdict.culprit.kind)
        wrong += [] if found == (f"blocks.1.{part}".rstrip("."), kind) else [(fault.name, found)]
    assert not wrong


def test_it_sees_what_the_fallback_lets_pass(
    calibrated: tuple[Trace, Floor], tmp_path: Path
) -> None:
    reference, floor = calibrated
    rng = np.random.default_rng(0)
    model = Transformer(layers=2)
    model.blocks[1].attn.v.change = lambda out, x: (
        out * (1 + 30 * EPS * rng.standard_normal(out.shape))
    ).astype(F32)
    made = trace(model, tmp_path / "b.jsonl")
    assert compare(reference, made).equal is True
    verdict = compare(reference, made, floor=floor)
    assert verdict.culprit is not None and verdict.culprit.module == "blocks.1.attn.v"


def test_files_that_hold_no_floor(calibrated: tuple[Trace, Floor], tmp_path: Path) -> None:
    path = tmp_path / "floor.json"
    good = calibrated[1].to_dict()
    for bad in (
        "",
        "[]",
        "{}",
        "nul",
        json.dumps({**good, META: {"schema": 2}}),
        json.dumps({**good, "errors": {"m": {"out": 1}}}),
        json.dumps({**good, "errors": {"m": {"out:x": -1}}}),
        json.dumps({**good, "errors": {"m": {"out:x": 10**400}}}),
        json.dumps({**good, "errors": [1]}),
        json.dumps({**good, META: {"schema": True}}),
    ):
        path.write_text(bad)
        with pytest.raises(TraceError, match=r"floor\.json"):
            load(path)
    with pytest.raises(TraceError):
        load(tmp_path / "none.json")
    with pytest.raises(TraceError, match="cannot be written"):
        save(calibrated[1], tmp_path / "no" / "floor.json")


def test_reruns_that_are_none(calibrated: tuple[Trace, Floor], tmp_path: Path) -> None:
    reference, _ = calibrated
    for reruns in ([], "a.jsonl"):
        with pytest.raises(TraceError, match="expected a list"):
            build(reference, reruns)
    other = trace(Transformer(layers=1), tmp_path / "b.jsonl", rename=lambda name: f"x.{name}")
    with pytest.raises(TraceError, match="no record in common"):
        build(reference, [other])
