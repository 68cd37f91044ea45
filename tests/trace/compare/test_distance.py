"""distance: an estimate of the relative L2 distance, bounds from below, and what is no number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from polyattn.trace import Record
from polyattn.trace.compare.distance import distance
from polyattn.trace.format.record import parse_record
from polyattn.trace.statistics import statistics

RNG = np.random.default_rng(0)


def record(value: Any, **without: Any) -> Record:
    found = {**statistics(value), **without}
    head = {"seq": 0, "module": "m", "phase": "out", "tensor": "out"}
    return parse_record({**head, **{k: v for k, v in found.items() if v is not None}})


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.5])
def test_it_estimates_the_relative_distance(size: float) -> None:
    found = []
    for _ in range(100):
        x = RNG.standard_normal((40, 50))
        y = x + size * RNG.standard_normal((40, 50))
        true = np.linalg.norm(x - y) / np.linalg.norm(x)
        found.append(distance(record(x), record(y)).error / true)
    assert np.mean(found) == pytest.approx(1, abs=0.05)
    assert 0.05 < np.std(found) < 0.13  # 1 / sqrt(2 * 64)


def test_it_never_claims_more_than_there_is() -> None:
    """What is not the sketch bounds the distance from below, for any change."""
    for _ in range(300):
        x = RNG.standard_normal(RNG.integers(1, 300))
        y = x.copy()
        at = RNG.integers(0, x.size, RNG.integers(1, 5))
        y[at] += RNG.standard_normal(at.size) * 10.0 ** RNG.integers(-6, 2)
        true = np.linalg.norm(x - y) / np.linalg.norm(x)
        found = distance(record(x, sketch=None), record(y, sketch=None)).error
        assert found <= true * (1 + 1e-6) + 1e-9


def test_what_the_sketch_cannot_see_is_seen_elsewhere() -> None:
    """Two changes that cancel in their bucket leave the norm, the extremes or a sample."""
    from polyattn.trace.statistics.sketch import sketch

    x = RNG.standard_normal(640)
    x[5::64] = 0.0  # where the changes are: both make the norm greater
    for other in range(1, 10):
        y = x.copy()
        y[5] += 3.0
        for sign in (1, -1):
            z = y.copy()
            z[5 + 64 * other] += 3.0 * sign
            if np.allclose(sketch(z), sketch(x)):
                assert distance(record(x), record(z)).error > 0.01
                return
    pytest.fail("no pair of elements cancels")


def test_permutations_are_seen_and_said() -> None:
    x = RNG.standard_normal((4, 8, 16))
    found = distance(record(x), record(x[[1, 0, 2, 3]]))
    assert found.error > 0.5 and found.order
    turned = distance(record(x), record(x.transpose(0, 2, 1)))
    assert turned.error == pytest.approx(0, abs=1e-12) and turned.order and "shape" in turned.why
    assert not distance(record(x), record(x * 1.01)).order


def test_one_factor_is_told_from_noise() -> None:
    x = RNG.standard_normal((50, 50))
    assert distance(record(x), record(x * 1.001)).scale > 0.8
    assert distance(record(x), record(x + 1e-3 * RNG.standard_normal(x.shape))).scale < 0.2


def test_zeros_and_near_zeros() -> None:
    zero, tiny = np.zeros(100), np.full(100, 1e-9)
    assert distance(record(zero), record(zero)).error == 0
    assert distance(record(zero), record(tiny)).error == pytest.approx(1, rel=0.5)
    assert distance(record(zero), record(tiny), rms=1.0).error < 1e-5
    assert distance(record(np.zeros((0, 3))), record(np.zeros((0, 3)))).error == 0


def test_what_is_not_finite() -> None:
    x = RNG.standard_normal(50)
    hole = np.where(x > 1, np.nan, x)
    assert distance(record(hole), record(hole)).error == 0
    assert distance(record(x), record(hole)).error == math.inf
    assert "NaN" in distance(record(x), record(hole)).why
    assert not distance(record(x * np.nan), record(x)).comparable
    assert distance(record(x), record(np.where(x > 1, np.inf, x))).error == math.inf


def test_float64_is_told_below_what_a_sketch_holds() -> None:
    x = RNG.standard_normal(1000)
    assert distance(record(x), record(x + 1e-15)).error < 1e-8
    assert distance(record(x), record(x * (1 + 1e-8))).error > 3e-9


def test_what_could_not_be_read_is_not_compared() -> None:
    head = {"seq": 0, "module": "m", "phase": "out", "tensor": "out"}
    lost = parse_record({**head, "shape": [0], "dtype": "unknown", "note": "a Refuses"})
    for pair in ((lost, lost), (record(np.ones(3)), lost), (lost, record(np.ones(3)))):
        found = distance(*pair)
        assert not found.comparable and found.why == "a Refuses"
    sparse = parse_record({**head, "shape": [3], "dtype": "float32", "note": "it is sparse"})
    found = distance(record(np.ones(3)), sparse)
    assert not found.comparable and found.why == "it is sparse"
    assert distance(record(np.ones(4)), sparse).error == math.inf  # its shape is known


def test_sums_bound_the_distance() -> None:
    x, y = np.ones(16), np.ones(16)
    y[3] += 4
    only = {"l2": 4.0, "sketch": None, "samples": None, "min": None, "max": None, "mean": None,
            "l1": None, "abs_mean": None}  # fmt: skip
    found = distance(record(x, **only, sum=16.0), record(y, **only, sum=20.0))
    assert found.error == pytest.approx(4 / math.sqrt(16) / 4)  # of a distance of 4 / 4
    assert "sum" in found.evidence
