"""Plans and reports that were damaged: an error that says so, whatever is in them."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")
from polyattn import InvalidProblem, OffloadError, Problem
from polyattn.hooks.layerwise_offload import OffloadPlan, OffloadReport, PlannedUnit
from polyattn.hooks.layerwise_offload.meter import Event
from polyattn.hooks.layerwise_offload.offload_report import UnitRow

ROW = UnitRow(0, "blocks.0", 4, "disk", 1, 1, 0, 0.1, 0.1, 0.1)
REPORT = OffloadReport(
    (ROW,), 1, 0.1, None, 0.1, 0.1, 9, 9, 0, 4, 0, 0, 0, 0, (Event("copy", -1, 1.0, 2.0),)
)
PLAN = OffloadPlan("cpu", 9, 1, (PlannedUnit("a", 4, "disk"),), 0, 0, 0, 9)
NESTED = "[" * 100_000


def changed(text: str, value: Any, *path: Any) -> str:
    data = place = json.loads(text)
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (0, ("units", 0, "tier")),
        ("\ud800", ("units", 0, "name")),
        ({}, ("units", 0, "index")),
        ({"a": 1}, ("events", 0, "unit")),
        (["a"], ("events", 0, "begin")),
        (float("nan"), ("events", 0, "end")),
        (float("inf"), ("bytes_written_back",)),
        (10**400, ("copy_s",)),
        (-1, ("passes",)),
    ],
)
def test_a_damaged_report_is_refused(value: Any, path: tuple[Any, ...]) -> None:
    assert OffloadReport.from_json(REPORT.to_json()) == REPORT
    with pytest.raises(OffloadError, match="no report of this version"):
        OffloadReport.from_json(changed(REPORT.to_json(), value, *path))


def test_lists_within_lists_and_huge_numbers_are_refused() -> None:
    with pytest.raises(OffloadError, match="no report"):
        OffloadReport.from_json(NESTED)
    with pytest.raises(OffloadError, match="no plan"):
        OffloadPlan.from_json(NESTED)
    with pytest.raises(OffloadError, match="no plan"):
        OffloadPlan.from_json(changed(PLAN.to_json(), 10**400, "units", 0, "copy_s"))
    with pytest.raises(InvalidProblem, match="expected the JSON of a Problem"):
        Problem.from_json(NESTED)


@pytest.mark.parametrize(
    ("name", "value"),
    [("bias", 1.5), ("sinks_grad", {}), ("framework", []), ("scale", 10**400), ("sinks", True)],
)
def test_a_problem_of_other_kinds_of_values_is_refused(name: str, value: Any) -> None:
    text = Problem(batch=1, q_len=3, kv_len=3, heads=2, kv_heads=2, head_dim=8).to_json()
    assert Problem.from_json(text).to_json() == text
    with pytest.raises(InvalidProblem, match=name):
        Problem.from_json(changed(text, value, name))
