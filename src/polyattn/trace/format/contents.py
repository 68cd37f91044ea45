"""Trace: what a trace file, or those of several ranks, held."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from polyattn.errors import TraceError
from polyattn.trace.format.header import Header
from polyattn.trace.format.record import Record

__all__ = ["Trace"]


@dataclass(frozen=True)
class Trace:
    """A trace that was read: `records` in the order of their `seq`.

    `ended`: whether the run closed its trace; False when the process was killed. `notes`: what is
    worth saying of the file, as that its last line was cut off. `paths`: the files it was read
    from. `headers`: of each file; `header` is the first.
    """

    header: Header
    records: tuple[Record, ...]
    ended: bool
    notes: tuple[str, ...] = ()
    paths: tuple[Path, ...] = ()
    headers: tuple[Header, ...] = field(default=(), repr=False)

    def file_of(self, record: Record) -> Path | None:
        """Return where the record's full tensor is, below the trace's folder; None if it has none.

        Raises TraceError if that is a link to elsewhere.
        """
        if record.file is None:
            return None
        folder = self.paths[0].parent.resolve()
        found = (folder / record.file).resolve()
        if not found.is_relative_to(folder):
            raise TraceError(
                f"got {record.file!r} in {self.paths[0]}, which leads out of the trace's folder."
            )
        return found
