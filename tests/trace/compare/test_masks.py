"""Masks of either kind and convention: right ports have others, and a wrong one is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyattn.trace import TraceWriter
from polyattn.trace.compare import Verdict, compare
from polyattn.trace.compare.distance import distance
from tests.trace.compare.models import F32
from tests.trace.compare.test_distance import record

RNG = np.random.default_rng(0)
X, Y, Z, W = (RNG.standard_normal((16, 16)).astype(F32) for _ in range(4))

HIDDEN = np.triu(np.ones((16, 16), bool), 1)
INFINITE = np.where(HIDDEN, F32(-np.inf), F32(0))
SMALLEST = np.where(HIDDEN, np.finfo(F32).min, F32(0))


def two(tmp_path: Path, ours: Any, theirs: Any, right: bool = True) -> Verdict:
    for name, mask, out in (("a", ours, Z), ("b", theirs, Z if right else W)):
        with TraceWriter(tmp_path / f"{name}.jsonl", overwrite=True) as writer:
            writer.add("norm", "in", "args[0]", X, cls="Norm")
            writer.add("norm", "out", "out", Y, cls="Norm")
            writer.add("attn", "in", "args[0]", Y, cls="Attention")
            writer.add("attn", "in", "args[1]", mask, cls="Attention")
            writer.add("attn", "out", "out", out, cls="Attention")
    return compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl")


@pytest.mark.parametrize("added", [INFINITE, SMALLEST], ids=["-inf", "smallest"])
@pytest.mark.parametrize("boolean", [HIDDEN, ~HIDDEN], ids=["hidden", "shown"])
def test_booleans_for_numbers(tmp_path: Path, added: Any, boolean: Any) -> None:
    assert two(tmp_path, added, boolean).equal is True
    assert two(tmp_path, boolean, added).equal is True
    verdict = two(tmp_path, added, boolean, right=False)
    assert verdict.culprit is not None and verdict.culprit.tensor == "out"


def test_nan_is_no_mask() -> None:
    found = distance(record(HIDDEN), record(np.where(HIDDEN, np.nan, 1.0)))
    assert found.comparable and found.error == np.inf


@pytest.mark.parametrize("kind", [bool, np.int64])
def test_the_opposite_convention(tmp_path: Path, kind: Any) -> None:
    """It is right where what comes of it is, and else the first thing that is wrong."""
    ours, theirs = HIDDEN.astype(kind), (~HIDDEN).astype(kind)
    assert two(tmp_path, ours, theirs).equal is True
    verdict = two(tmp_path, ours, theirs, right=False)
    assert verdict.culprit is not None and verdict.culprit.tensor == "args[1]"
    assert two(tmp_path, ours, theirs.T.copy()).exit_code == 1  # another mask


@pytest.mark.parametrize("ours", [INFINITE, SMALLEST], ids=["-inf", "smallest"])
@pytest.mark.parametrize("theirs", [INFINITE, SMALLEST], ids=["-inf", "smallest"])
def test_a_transposed_mask(tmp_path: Path, ours: Any, theirs: Any) -> None:
    """As many elements are masked, others."""
    assert two(tmp_path, ours, theirs).equal is True
    verdict = two(tmp_path, ours, theirs.T.copy(), right=False)
    assert verdict.culprit is not None and verdict.culprit.tensor == "args[1]"
    assert verdict.culprit.at == "attn"


def test_a_mask_of_another_form_is_compared_by_what_it_hides(tmp_path: Path) -> None:
    assert two(tmp_path, INFINITE, SMALLEST.reshape(1, 1, 16, 16)).equal is True
