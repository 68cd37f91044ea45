"""What a run found: counts for each backend, failures with a line that makes them again."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from polyattn.conformance.cases import Case
from polyattn.conformance.check import Verdict

__all__ = ["Failure", "Report", "Tally"]

ENOUGH = 5  # refusals for one reason before "it could always" means something
KINDS = ("wrong", "false_acceptance", "false_refusal")


@dataclass(frozen=True)
class Failure:
    """One finding. `kind`: ``wrong``, ``false_acceptance`` or ``false_refusal``."""

    kind: str
    backend: str
    spec: str
    detail: str
    compiled: bool = False
    framework: str = "torch"
    device: str = "cpu"

    @property
    def reproduce(self) -> str:
        """The command that shows it again; each run begins with what is not a case (dropout)."""
        command = f"polyattn fuzz --backend {self.backend}"
        command += "" if self.framework == "torch" else f" --framework {self.framework}"
        command += "" if self.device == "cpu" else f" --device {self.device}"
        if not self.spec:
            return f"{command} --problems 1"
        command += " --compiled" if self.compiled else ""
        return f"{command} --case {shlex.quote(self.spec)}"

    def to_dict(self) -> dict[str, str]:
        """Return a JSON-able form."""
        return {
            "kind": self.kind,
            "backend": self.backend,
            "detail": self.detail,
            "case": self.spec,
            "reproduce": self.reproduce,
        }


@dataclass
class Tally:
    """The counts of one backend. `alone`: by reason, how often it was refused for that reason
    only, how often it came out right when run anyway, and a case in which it did.
    """

    counts: Counter[str] = field(default_factory=Counter)
    alone: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, case: Case, verdict: Verdict) -> None:
        """Count one verdict."""
        self.counts[verdict.outcome if verdict.outcome != "refused_alone" else "refused"] += 1
        if verdict.outcome == "refused_alone":
            row = self.alone.setdefault(verdict.fact, [0, 0, ""])
            row[0] += 1
            row[1] += verdict.able
            row[2] = row[2] or (case.spec if verdict.able else "")

    def false_refusals(self) -> dict[str, list[Any]]:
        """Return the reasons for which it was refused and always could."""
        return {fact: row for fact, row in self.alone.items() if row[0] == row[1] >= ENOUGH}


@dataclass
class Report:
    """A run: `problems` done of `asked`, a tally for each backend, and the failures."""

    seed: int
    asked: int
    device: str = "cpu"
    compiled: bool = False
    framework: str = "torch"
    problems: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    tallies: dict[str, Tally] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def add(self, case: Case, backend: str, verdict: Verdict, smallest: Case | None = None) -> None:
        """Count a verdict, and keep it with its smallest case if it is a failure."""
        self.tallies.setdefault(backend, Tally()).add(case, verdict)
        if verdict.fails:
            spec = (smallest or case).spec
            self.failures.append(
                Failure(
                    verdict.outcome,
                    backend,
                    spec,
                    verdict.detail,
                    self.compiled,
                    self.framework,
                    self.device,
                )
            )

    def close(self) -> None:
        """Judge the refusals of the whole run; called once at its end."""
        for name, tally in self.tallies.items():
            for fact, (times, _, spec) in tally.false_refusals().items():
                detail = (
                    f"refused {times} times for its {fact} alone, and always right if run anyway"
                )
                tally.counts["false_refusal"] += 1
                self.failures.append(
                    Failure(
                        "false_refusal",
                        name,
                        spec,
                        detail,
                        framework=self.framework,
                        device=self.device,
                    )
                )

    @property
    def ok(self) -> bool:
        """Whether nothing was found; True also where nothing was `tested`."""
        return not self.failures

    @property
    def tested(self) -> int:
        """How often a backend took a problem; 0 says nothing for or against it."""
        return sum(map(_taken, self.tallies.values()))

    @property
    def untested(self) -> list[str]:
        """The backends that refused every problem they were asked."""
        return [name for name, tally in self.tallies.items() if not _taken(tally)]

    def count(self, outcome: str) -> int:
        """Return how often an outcome came up, over all backends."""
        return sum(tally.counts[outcome] for tally in self.tallies.values())

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        outcomes = ("right", *KINDS, "refused")
        return {
            "seed": self.seed, "asked": self.asked, "problems": self.problems,
            "device": self.device, "framework": self.framework, "compiled": self.compiled,
            "seconds": round(self.seconds, 3),
            "interrupted": self.interrupted, "ok": self.ok, "tested": self.tested,
            **{kind: self.count(kind) for kind in KINDS},
            "backends": {
                name: {
                    **{outcome: tally.counts[outcome] for outcome in outcomes},
                    "refused_alone": {
                        fact: {"times": row[0], "right_if_run_anyway": row[1]}
                        for fact, row in sorted(tally.alone.items())
                    },
                }
                for name, tally in self.tallies.items()
            },
            "absent": dict(self.absent),
            "failures": [failure.to_dict() for failure in self.failures],
        }  # fmt: skip


def _taken(tally: Tally) -> int:
    return sum(tally.counts[outcome] for outcome in ("right", "wrong", "false_acceptance"))
