"""Verdict: what a comparison found, as values, as text and as plain data for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Coverage", "Culprit", "Guard", "Row", "Verdict"]


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """Whose doing the first difference is.

    `module`: the port's name; `reference_module`: the reference's, None where it has none. `kind`:
    "output" (its inputs agree, its output differs), "input" (its own code between its children
    handed over something else), or "parameter" (a weight differs). `at`, `tensor`, `phase`, `step`,
    `call`: where it shows. `after`: the module that agreed last before. `between`: modules of the
    port that ran since and could not be compared; `lacking`: of the reference. `others`: modules
    that differ on their own as well.
    """

    module: str
    reference_module: str | None
    kind: str
    phase: str = ""
    step: int | None = None
    call: int | None = None
    at: str = ""
    tensor: str = ""
    after: str | None = None
    between: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    error: float = 0.0
    threshold: float = 0.0
    evidence: str = ""


@dataclass(frozen=True)
class Guard:
    """A condition of any comparison. `holds`: None where it could not be checked."""

    name: str
    holds: bool | None
    said: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One call of one module. `verdict`: same, culprit, inherited, differs (on its own, in an
    isolated run, besides the culprit), extra, missing, cannot say or not compared. Errors are
    relative; `contributed` is what the call adds to `inherited`.
    """

    module: str | None
    reference_module: str | None
    cls: str = ""
    phase: str = "forward"
    step: int | None = None
    call: int = 0
    depth: int = 0
    error_in: float | None = None
    error_out: float | None = None
    inherited: float | None = None
    contributed: float | None = None
    threshold: float | None = None
    verdict: str = "not compared"
    how: str = ""
    note: str = ""


@dataclass(frozen=True)
class Coverage:
    """How many of the modules that ran were compared, of either side, and which were not."""

    compared: int = 0
    reference: int = 0
    port: int = 0
    only_reference: tuple[str, ...] = ()
    only_port: tuple[str, ...] = ()
    weights: int = 0

    def __str__(self) -> str:
        return (
            f"compared {self.compared} modules, of {self.reference} of the reference and "
            f"{self.port} of the port, and {self.weights} weights"
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`equal`: True, False, or None where it cannot be said; `reasons` says why not.

    `culprit`: whose doing the first difference is. `rows`: every call in the port's order.
    `guards`: by name. `coverage`, `notes`. `reference`, `port`: where the traces are from.
    ``str(verdict)`` is for a terminal, :meth:`to_dict` for JSON.
    """

    equal: bool | None
    culprit: Culprit | None = None
    rows: tuple[Row, ...] = ()
    guards: Mapping[str, Guard] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=Coverage)
    notes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    reference: str = ""
    port: str = ""

    @property
    def exit_code(self) -> int:
        """0 for the same, 1 for different, 2 where it cannot be said."""
        return 2 if self.equal is None else int(not self.equal)

    def __str__(self) -> str:
        from polyattn.trace.compare.verdict_text import text

        return text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; infinite errors, as of another shape, are the text "infinity"."""
        found = {
            "equal": self.equal,
            "exit_code": self.exit_code,
            "reference": self.reference,
            "port": self.port,
            "culprit": None if self.culprit is None else asdict(self.culprit),
            "reasons": list(self.reasons),
            "guards": {name: asdict(one) for name, one in self.guards.items()},
            "coverage": asdict(self.coverage),
            "notes": list(self.notes),
            "rows": [asdict(row) for row in self.rows],
        }
        return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "infinity"
    return value
