"""What was found of one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["OUTCOMES", "Row"]

OUTCOMES = {
    "equal": "every output within the tolerance rule",
    "as sdpa": "equal to the library's sdpa, which is not equal to its eager here",
    "unsteady": "its eager attention is itself far from float64: it ranks what rounding swaps",
    "different": "some output outside of it",
    "refused": "polyattn says that it cannot run this model, and why",
    "no attention": "the model calls no attention, built as it was",
    "not of the interface": "its attention is its own code, which no implementation replaces",
    "not built": "it could not be built small, or run on its own attention",
    "crashed": "its process died",
    "cut short": "it took longer than it may",
}
"""What may be found, and what it means; those of the first lines are what it is about."""


@dataclass
class Row:
    """One model: the class that was built, what was found and why, and what went where.

    `calls`: attention calls that polyattn ran, over all `cases` (kinds of inputs); `masks`: what
    these calls hid, as masks are written; `excess`: the worst error over what it may be.
    """

    name: str
    outcome: str
    reason: str = ""
    model: str = ""
    cases: tuple[str, ...] = ()
    calls: int = 0
    backends: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    excess: float = 0.0
    seconds: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON has it: what is empty is left out."""
        return {name: value for name, value in asdict(self).items() if value or name == "outcome"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Row:
        """Return the row that :meth:`to_json` told."""
        lists = {k: tuple(v) for k, v in told.items() if isinstance(v, list)}
        return cls(**{**told, **lists})
