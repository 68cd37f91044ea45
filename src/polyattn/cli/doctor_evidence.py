"""The part of ``polyattn doctor`` on what the choice of native_cpu rests on.

Nothing is measured here: what is not known yet is said to be so.
"""

from __future__ import annotations

from typing import Any

from polyattn import settings
from polyattn.selection.evidence import of_machine
from polyattn.selection.evidence.calibrated_rows import SOURCE
from polyattn.selection.evidence.problem_kinds import DTYPES
from polyattn.selection.registry import Available, registry

__all__ = ["evidence_report", "evidence_rows"]


def evidence_report() -> dict[str, Any]:
    """Return the evidence in force on this machine: the record that fits, and every figure."""
    known = of_machine.this_machine("torch")
    return {
        "native": isinstance(registry.probe(("torch", "native_cpu")), Available),
        "record": known.record,
        "calibration": settings.current().calibration,
        "figures": [
            {
                "dtype": dtype,
                "kind": kind,
                "low": round(one.low, 3),
                "median": round(one.median, 3),
                "high": round(one.high, 3),
                "source": one.source,
                "chosen": "native_cpu" if one.prefers_native else "torch's own kernel",
            }
            for (dtype, kind), one in known.figures.items()
        ],
    }


def evidence_rows(report: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the rows of the table: where the figures come from, and those of each dtype."""
    if report is None or "error" in report or not report["native"]:
        return []
    figures = report["figures"]
    made = [one for one in figures if one["source"] == SOURCE]
    sources = [f"the record {report['record']}"] if report["record"] else []
    sources += [SOURCE] if made else []
    if not figures:
        later = "calibrated at the first call that is large enough"
        off = "torch's own kernel is taken (POLYATTN_CALIBRATION=off)"
        sources = [f"no record of such a machine; {later if report['calibration'] else off}"]
    rows = [("native_cpu or torch", ", ".join(sources))]
    for dtype in DTYPES:
        told = [f"{one['kind']} {one['median']:.3g}" for one in figures if one["dtype"] == dtype]
        if told:
            rows.append(("", f"x torch's kernel, {dtype}: {', '.join(told)}"))
    return rows
