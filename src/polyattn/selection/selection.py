"""The decision as a value: what was chosen, by whose wish, and what was decided of the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from polyattn.problem import Problem
from polyattn.selection.capabilities import Reason

__all__ = ["Accepted", "Decision", "Rejected", "Selection", "Source"]


class Source(StrEnum):
    """Where a choice came from, from the strongest to the weakest; the first five are requests."""

    FORCED = "FORCED"
    CALL = "CALL"
    SCOPE = "SCOPE"
    MODULE = "MODULE"
    ENV = "ENV"
    TUNED = "TUNED"
    HEURISTIC = "HEURISTIC"

    @property
    def is_request(self) -> bool:
        """Whether the choice is strict: it runs there or raises."""
        return self not in (Source.TUNED, Source.HEURISTIC)


@dataclass(frozen=True)
class Accepted:
    """The backend can run the problem; `detail` says its version or what was assumed."""

    detail: str = ""

    def __str__(self) -> str:
        return f"can run it{f' ({self.detail})' if self.detail else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"accepted": True, "detail": self.detail}


@dataclass(frozen=True)
class Rejected:
    """The backend cannot run the problem here; every reason, with what would change it."""

    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.reasons))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        reasons = [vars(reason) | {} for reason in self.reasons]
        return {"accepted": False, "reasons": reasons}


Decision = Accepted | Rejected


@dataclass(frozen=True)
class Selection:
    """One decision. `overridden` holds the weaker requests that this choice went against.

    `reason` is why the source preferred this backend; `fallback` is the request that could not
    be met, where the policy allowed another backend to step in. `of_class`: the very decision that
    this call shares with others of its class of sizes.
    """

    backend: str
    source: Source
    config: Mapping[str, Any] = field(default_factory=dict)
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    overridden: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    version: str = ""
    fallback: str | None = None
    problem: Problem | None = None
    of_class: Selection | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-able data.

        >>> Selection("flex", Source.CALL).to_dict()["source"]
        'CALL'
        """
        return {
            "backend": self.backend,
            "source": str(self.source),
            "reason": self.reason,
            "version": self.version,
            "config": dict(self.config),
            "overridden": dict(self.overridden),
            "fallback": self.fallback,
            "problem": None if self.problem is None else str(self.problem),
            "decisions": {name: d.to_dict() for name, d in self.decisions.items()},
        }

    def __str__(self) -> str:
        lines = [f"{self.backend}  <- {self.source}: {self.reason}".rstrip(": ")]
        if self.problem is not None:
            lines.append(f"  problem: {self.problem}")
        if self.fallback:
            lines.append(f"  fallback: {self.fallback}")
        lines += [f"  overrode {source}: {name}" for source, name in self.overridden.items()]
        width = max(map(len, self.decisions), default=0)
        for name, decision in self.decisions.items():
            sign = "+" if isinstance(decision, Accepted) else "-"
            lines.append(f"  {sign} {name:<{width}}  {decision}")
        return "\n".join(lines)
