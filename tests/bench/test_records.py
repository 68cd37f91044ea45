"""`polyattn bench compare` on records whose numbers are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyattn.bench import main, records


@pytest.mark.parametrize("number", [10**400, float("nan"), float("inf"), True])
def test_times_that_are_no_finite_numbers_are_refused(
    number: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"median": 1.0, "q1": 0.9, "q3": 1.1}
    for name, found in (("good", times), ("bad", {**times, "median": number})):
        rows = [{"name": "call", "extra_us": found}]
        record = {"schema": records.SCHEMA, "kind": "k", "machine": {}, "versions": {}}
        (tmp_path / f"{name}.json").write_text(json.dumps({**record, "rows": rows}))
    assert main(["compare", str(tmp_path / "good.json"), str(tmp_path / "good.json")]) == 0
    assert main(["compare", str(tmp_path / "good.json"), str(tmp_path / "bad.json")]) == 2
    assert "is damaged" in " ".join(capsys.readouterr().err.split())
