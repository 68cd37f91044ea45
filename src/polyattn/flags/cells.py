"""Cells: the state behind the knobs, in pieces that can be put back exactly.

One setting of a framework may change several pieces of state, and one piece may be changed under
several names. A *cell* is such a piece. Cells that can only be read or written together form a
:class:`Cells`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polyattn.flags.knob import Knob

__all__ = ["Access", "Cell", "Cells", "Single"]


class Cells:
    """Pieces of state that are read and written together; `per_thread` holds those of a thread."""

    per_thread: frozenset[str] = frozenset()

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the exact state of the named cells, such that :meth:`write` restores it."""
        raise NotImplementedError

    def write(self, values: Mapping[str, Any]) -> None:
        """Set the named cells to what :meth:`read` returned, and change no other."""
        raise NotImplementedError

    def cell(self, name: str) -> Cell:
        """Return one cell."""
        return Cell(self, name)


@dataclass(frozen=True)
class Cell:
    """One piece of state."""

    owner: Cells
    name: str

    @property
    def per_thread(self) -> bool:
        """Whether each thread has its own."""
        return self.name in self.owner.per_thread


class Single(Cells):
    """One piece of state with a getter and a setter of its own."""

    def __init__(
        self, read: Callable[[], Any], write: Callable[[Any], object], *, per_thread: bool = False
    ) -> None:
        self._read, self._write = read, write
        if per_thread:
            self.per_thread = frozenset({"value"})

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self._read() for name in names}

    def write(self, values: Mapping[str, Any]) -> None:
        for value in values.values():
            self._write(value)


def _nothing_lacks(value: Any = None) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class Access:
    """How a knob is reached here: read, set the framework's way, and which cells that changes.

    `write` is None for what cannot be set by anyone; `lacks(value)` says why this build or this
    moment does not let the knob be set (to `value`, if one is given), empty when it does.
    `convert` turns what the framework takes for a value into ours (an enum into its name). Of
    several knobs set at once those of lower `rank` come first. `settle` brings a reading back, with
    inheritance where it can be had, for snapshots: they hold readings, not what is stored.
    """

    knob: Knob
    read: Callable[[], Any] | None = None
    unreadable: Callable[[], str] = lambda: ""
    write: Callable[[Any], object] | None = None
    touches: tuple[Cell, ...] = ()
    lacks: Callable[..., str] = _nothing_lacks
    convert: Callable[[Any], Any] = lambda value: value
    rank: int = 9
    verify: Callable[[Any], bool] = lambda value: True
    settle: Callable[[Any], object] | None = None
