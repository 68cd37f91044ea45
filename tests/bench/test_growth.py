"""The growth benchmark: calls of ever new shapes, and a verdict that can be no."""

from __future__ import annotations

import itertools
import json

import pytest

pytest.importorskip("torch")

from polyattn.bench import growth, main
from polyattn.torch.cache import table


def test_no_shape_comes_twice() -> None:
    shapes = list(growth._distinct(5000))
    assert len(set(shapes)) == len(shapes) == 5000


def test_the_command_says_that_memory_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["growth", "--shapes", "600", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["bounded"] is True
    assert record["steps"][-1]["shapes"] == record["shapes"] == 600
    assert len(record["steps"]) == 20
    assert all(0 < step["entries"] <= 4096 for step in record["steps"])
    assert all(step["resident_mib"] > 1 for step in record["steps"])


def test_the_table_is_emptied_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyattn.torch.cache._MOST_ENTRIES", 50)
    table.forget()
    record = growth.measure(200, lambda line: None)
    assert max(step["entries"] for step in record["steps"]) <= 50


def test_memory_that_grows_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = itertools.count(100.0, 10.0)
    monkeypatch.setattr(growth, "_resident_mib", lambda: next(sizes))
    assert main(["growth", "--shapes", "100"]) == 1
    said = capsys.readouterr().out
    assert "NOT bounded" in said and "100 shapes" in said


def test_too_few_shapes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["growth", "--shapes", "5"]) == 2
    assert "at least 100" in capsys.readouterr().err
