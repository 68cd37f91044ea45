"""What doctor says of the evidence in force."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from polyattn.cli.doctor import main
from polyattn.cli.doctor_evidence import evidence_report, evidence_rows
from polyattn.selection.evidence import UNMEASURED, Evidence, Figure
from polyattn.selection.evidence.calibrated_rows import SOURCE
from polyattn.selection.evidence.of_machine import assume
from polyattn.selection.evidence.shipped import shipped
from polyattn.selection.registry import Available, registry

pytestmark = pytest.mark.skipif(
    not isinstance(registry.probe(("torch", "native_cpu")), Available),
    reason="native_cpu is not built here",
)


def text() -> str:
    return "\n".join(f"{name} {said}" for name, said in evidence_rows(evidence_report()))


def test_a_record_is_named_with_its_figures() -> None:
    record = next(one for one in shipped() if one.name == "intel-amx")
    with assume(Evidence(record.figures, record=record.name)):
        said = text()
    assert "native_cpu or torch the record intel-amx" in said
    dense, wide = (record.figures["bfloat16", kind].median for kind in ("dense", "wide"))
    assert f"bfloat16: dense {dense:.3g}, wide {wide:.3g}" in said and SOURCE not in said


def test_a_calibration_is_told_apart() -> None:
    with assume(Evidence({("float32", "dense"): Figure(0.9, 1.2, 1.5, SOURCE)})):
        said, report = text(), evidence_report()
    assert SOURCE in said and "dense 1.2" in said
    assert report["figures"][0]["chosen"] == "torch's own kernel"  # 0.9 at worst


def test_without_any_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with assume(UNMEASURED):
        assert "torch's own kernel is taken (POLYATTN_CALIBRATION=off)" in text()
        monkeypatch.setenv("POLYATTN_CALIBRATION", "on")
        assert "calibrated at the first call that is large enough" in text()


def test_doctor_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert {one["kind"] for one in report["evidence"]["figures"]} >= {"dense", "train"}
    assert "family" in report["cpu"]["identity"] or report["cpu"]["identity"]
    main([])
    assert "native_cpu or torch" in capsys.readouterr().out
