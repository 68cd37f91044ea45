"""`polyattn tune` ends when it is told to, also while the program runs."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from polyattn.cli import main
from polyattn.cli import tune as command
from polyattn.integrations.program.asked import Record


@pytest.mark.parametrize("code", [129, 130, 143])
def test_a_program_that_was_told_to_end_is_not_tuned(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tuned(*args: object, **options: object) -> None:
        raise AssertionError("it goes on")

    record = Record.__new__(Record)
    monkeypatch.setattr(command, "_recorded", lambda options, program: (record, code))
    monkeypatch.setattr("polyattn.measure.tune.tune", tuned)
    assert main(["tune", "-c", "pass"]) == code
    assert ("nothing is tuned" in capsys.readouterr().err) is (code != 130)
