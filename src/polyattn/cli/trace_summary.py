"""How much is in a trace file, by one pass over its lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyattn.trace.format import field_checks as checks

__all__ = ["Summary", "some_steps", "summary_of"]


@dataclass(frozen=True)
class Summary:
    """A trace's size: `records` and `bytes` of the file, and what the records are of."""

    path: Path
    records: int
    modules: int
    calls: int
    steps: tuple[int, ...]
    ended: bool
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**vars(self), "path": str(self.path), "steps": list(self.steps)}

    def __str__(self) -> str:
        counts = [
            _counted(self.records, "record"),
            f"of {_counted(self.calls, 'call')}",
            f"of {_counted(self.modules, 'module')}",
            some_steps(self.steps),
        ]
        size = f"{self.bytes / 1e6:.1f} MB" if self.bytes >= 1e6 else f"{self.bytes / 1e3:.1f} kB"
        end = "" if self.ended else ", without an end"
        return f"{self.path}: {' '.join(filter(None, counts))}, {size}{end}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def some_steps(steps: Iterable[int | None]) -> str:
    """Return steps in few words.

    >>> some_steps([0, 1, 2, 3]), some_steps([None, 7]), some_steps([None])
    ('in steps 0-3', 'in step 7', '')
    """
    found = sorted({step for step in steps if step is not None})
    if not found:
        return ""
    runs: list[list[int]] = []
    for step in found:
        if runs and step == runs[-1][-1] + 1:
            runs[-1][1:] = [step]
        else:
            runs.append([step])
    shown = ", ".join("-".join(map(str, run)) for run in runs[:8])
    return f"in step{'s' if len(found) > 1 else ''} {shown}{', ...' if len(runs) > 8 else ''}"


def summary_of(path: Path) -> Summary:
    """Count a file that was just written; a last line that was cut off does not count.

    It keeps no records: a reader that does would need more memory than the program had.
    """
    records, ended = 0, False
    calls: set[tuple[str, int, int | None]] = set()
    with path.open("rb") as lines:
        next(lines, None)
        for line in lines:
            try:
                raw = checks.parse(line)
            except checks.Malformed:
                continue
            ended = ended or "end" in raw
            if "seq" in raw:
                records += 1
                calls.add((raw.get("module", ""), raw.get("call", 0), raw.get("step")))
    steps = {step for _, _, step in calls if step is not None}
    modules = len({module for module, _, _ in calls})
    return Summary(
        path, records, modules, len(calls), tuple(sorted(steps)), ended, path.stat().st_size
    )
