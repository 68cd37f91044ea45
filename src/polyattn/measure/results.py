"""What a tuning run found, as values: for tables, for JSON, for the tuning table."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from polyattn.problem import Problem
from polyattn.tuning import Key, Measurement

__all__ = ["CaseResult", "ClassResult", "Timed", "TuningResult"]


@dataclass
class Timed:
    """One candidate on one case. Times are seconds; of a whole step where gradients are used."""

    backend: str
    config: dict[str, Any]
    status: str
    note: str = ""
    error: float = float("inf")
    tolerance: float = 0.0
    verified: bool = False
    median_s: float | None = None
    min_s: float | None = None
    max_s: float | None = None
    repeats: int = 0
    forward_s: float | None = None
    prepare_s: float = 0.0
    seconds: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """Backend and configuration, as one name."""
        config = json.dumps(self.config, sort_keys=True) if self.config else ""
        return f"{self.backend} {config}".strip()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; infinities, which JSON lacks, become None."""
        plain = dict(vars(self))
        return {
            k: None if isinstance(v, float) and v in (float("inf"),) else v
            for k, v in plain.items()
        }


@dataclass
class CaseResult:
    """One recorded case: every candidate's time, what is chosen now, and what that costs.

    `regret`: time of the choice over time of the fastest right backend, in a measurement of its
    own after the choice was made; `heuristic_regret`: the same for the choice without tuning.
    """

    problem: Problem
    calls: int
    timed: list[Timed] = field(default_factory=list)
    chosen: str = ""
    source: str = ""
    reason: str = ""
    regret: float | None = None
    regret_range: tuple[float, float] | None = None
    fastest: str = ""
    heuristic: str = ""
    heuristic_regret: float | None = None
    chosen_s: float | None = None
    fastest_s: float | None = None
    heuristic_s: float | None = None
    foreign: float = 0.0
    skipped: str = ""

    def of(self, label: str) -> Timed:
        """Return the candidate called `label`."""
        return next(timed for timed in self.timed if timed.label == label)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            **vars(self),
            "problem": str(self.problem),
            "timed": [t.to_dict() for t in self.timed],
        }


@dataclass
class ClassResult:
    """One class of problems: the rows that were stored for it, and its cases.

    `flags`: how the framework's flags stood; the rows hold its digest.
    """

    key: Key
    cases: list[CaseResult]
    rows: list[Measurement] = field(default_factory=list)
    flags: dict[str, Any] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """Calls of all its cases."""
        return sum(case.calls for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        rows = [{n: getattr(row, n) for n in row.__dataclass_fields__} for row in self.rows]
        for row in rows:
            row["error"] = None if row["error"] == float("inf") else row["error"]
        return {
            "problem_class": json.loads(self.key.problem),
            "device": self.key.device,
            "versions": self.key.versions,
            "calls": self.calls,
            "rows": rows,
            "cases": [case.to_dict() for case in self.cases],
        }


@dataclass
class TuningResult:
    """A tuning run; `interrupted` when it was ended early, with everything before kept."""

    classes: list[ClassResult] = field(default_factory=list)
    interrupted: bool = False
    total_classes: int = 0

    @property
    def cases(self) -> list[CaseResult]:
        """The cases of all classes."""
        return [case for one in self.classes for case in one.cases]

    def regret(self) -> float | None:
        """Time of all recorded calls on the choices, over that on the fastest backends."""
        return self._ratio("chosen_s")

    def heuristic_regret(self) -> float | None:
        """The same for the choices without measured times."""
        return self._ratio("heuristic_s")

    def worst_regret(self) -> float | None:
        """The largest regret of a single case."""
        return max((c.regret for c in self.cases if c.regret is not None), default=None)

    def _ratio(self, what: str) -> float | None:
        known = [c for c in self.cases if getattr(c, what) and c.fastest_s]
        fastest = sum(c.calls * (c.fastest_s or 0) for c in known)
        return sum(c.calls * getattr(c, what) for c in known) / fastest if fastest else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; the snapshots of flags by the digest that the rows hold."""
        flags = {row.flags: one.flags for one in self.classes for row in one.rows}
        return {
            "classes": [one.to_dict() for one in self.classes],
            "flags": flags,
            "interrupted": self.interrupted,
            "total_classes": self.total_classes,
            "regret": self.regret(),
            "worst_regret": self.worst_regret(),
            "heuristic_regret": self.heuristic_regret(),
        }
