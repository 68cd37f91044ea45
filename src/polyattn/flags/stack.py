"""The scopes that hold knobs just now, over all threads, and how each is undone exactly.

A scope notes how the cells that it touches stood before it. Scopes of one thread end in the reverse
order; those of several threads may end in any. When one ends, a cell that a later scope touched as
well keeps its value, and what the ending scope had noted becomes what the later one puts back. So
whatever the order, the last to end leaves every cell as it was before the first.
"""

from __future__ import annotations

import contextvars
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polyattn.errors import FlagsError
from polyattn.flags.cells import Access, Cell, Cells

__all__ = ["Change", "Entry", "FlagsConflictWarning", "Stack"]

Change = tuple[Access, Any]
_Key = tuple[Cell, int]  # the thread's number, 0 for cells of the whole process


class FlagsConflictWarning(UserWarning):
    """Two threads or tasks hold scopes of one process-wide knob with different values."""


@dataclass
class Entry:
    """One scope in force: what it set, what it must put back, and where it was entered."""

    number: int
    values: dict[str, Any]
    thread: str
    site: str
    before: dict[_Key, Any] = field(default_factory=dict)


class Stack:
    """The scopes of one framework."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._inside: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar(
            "polyattn.flags.inside", default=()
        )
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start_anew)

    def _start_anew(self) -> None:
        """In a forked child no other thread holds the lock, and no other will end its scope."""
        self._lock = threading.RLock()

    def enter(self, changes: Sequence[Change], on_conflict: str) -> Entry:
        """Set every knob or, on any error or interrupt, none; the entry notes what was there."""
        entry = Entry(
            next(self._numbers),
            {access.knob.name: value for access, value in changes},
            threading.current_thread().name,
            _site(),
        )
        try:
            clashes = self._enter(entry, changes, on_conflict)
            if clashes and on_conflict == "warn":
                warnings.warn(" ".join(clashes), FlagsConflictWarning, stacklevel=3)
            return entry
        except BaseException:
            self.leave(entry)
            raise

    def _enter(self, entry: Entry, changes: Sequence[Change], on_conflict: str) -> list[str]:
        with self._lock:
            clashes = [clash for change in changes if (clash := self._clash(change))]
            if clashes and on_conflict == "refuse":
                raise FlagsError(
                    f"{' '.join(clashes)} on_conflict='refuse' asked for an error; nothing was set."
                )
            before = _read(cell for access, _ in changes for cell in access.touches)
            entry.before = before
            self._entries.append(entry)
            self._inside.set((*self._inside.get(), entry.number))
            _perform(changes, before, lambda: _fault(changes))
            return clashes

    def leave(self, entry: Entry) -> None:
        """Undo a scope; cells that a later scope holds are put back when that one ends.

        To leave a scope that is not, or no longer, in force does nothing.
        """
        try:
            self._leave(entry)
        except BaseException:  # an interrupt may have cut it short anywhere
            try:
                self._leave(entry)
            finally:
                with self._lock:
                    self._entries[:] = [one for one in self._entries if one is not entry]
            raise

    def _leave(self, entry: Entry) -> None:
        with self._lock:
            if entry not in self._entries:
                return
            later = self._entries[self._entries.index(entry) + 1 :]
            now: dict[_Key, Any] = {}
            for key, value in entry.before.items():
                heir = next((e for e in later if key in e.before), None)
                if heir is None:
                    now[key] = value
                else:
                    heir.before[key] = value
            foreign = _put_back(now)
            self._inside.set(tuple(n for n in self._inside.get() if n != entry.number))
            self._entries.remove(entry)
        if foreign:
            raise FlagsError(
                "got the end of a scope in another thread than its beginning, expected the same, "
                "as it set knobs of a thread; what it set for the whole process is put back, the "
                "rest only that thread could put back."
            )

    def settle(self, changes: Sequence[Change], fault: Callable[[], str]) -> None:
        """Bring the readings of knobs back for good or, on any error or `fault`, set none."""
        with self._lock:
            settling = [(replace(a, write=a.settle or a.write), v) for a, v in changes]
            _perform(settling, _read(c for a, _ in changes for c in a.touches), fault)

    def _clash(self, change: Change) -> str:
        access, value = change
        name = access.knob.name
        cells = {(cell, 0) for cell in access.touches if not cell.per_thread}
        mine = set(self._inside.get())
        for entry in self._entries:
            same = name in entry.values and _identical(entry.values[name], value)
            if entry.number in mine or same or not cells & entry.before.keys():
                continue
            theirs = ", ".join(f"{knob}={held!r}" for knob, held in entry.values.items())
            return (
                f"{name}={value!r} is not for this thread alone, and {entry.thread} holds {theirs} "
                f"(entered at {entry.site}): while both scopes last, the later one is in force "
                "for both."
            )
        return ""


def _identical(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b


def _perform(changes: Sequence[Change], before: dict[_Key, Any], fault: Callable[[], str]) -> None:
    try:
        for access, value in sorted(changes, key=lambda change: change[0].rank):
            _write_one(access, value)
        if found := fault():
            raise FlagsError(f"{found} Nothing was set.")
    except BaseException:
        _put_back(before)
        raise


def _write_one(access: Access, value: object) -> None:
    try:
        if access.write is not None:
            access.write(value)
    except Exception as error:
        name = access.knob.name
        raise FlagsError(
            f"got {name}={value!r}, which {access.knob.where} refuses: {_first_line(error)}. "
            "Nothing was set.",
            name,
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


def _fault(changes: Sequence[Change]) -> str:
    """Say which knob is not in force as it was set; empty when all are."""
    for access, value in changes:
        try:
            if access.verify(value):
                continue
            found = repr(access.read()) if access.read else "nothing"
            why = f"it reads as {found}"
        except Exception as error:
            why = f"the framework's getter raises ({_first_line(error)})"
        together = " The knobs set together contradict each other." if len(changes) > 1 else ""
        return f"got {access.knob.name}={value!r}, but it is not in force then: {why}.{together}"
    return ""


def _read(cells: Iterable[Cell]) -> dict[_Key, Any]:
    found: dict[_Key, Any] = {}
    for owner, names in _by_owner(cells).items():
        for name, value in owner.read(names).items():
            found[_key(owner.cell(name))] = value
    return found


def _key(cell: Cell) -> _Key:
    return cell, threading.get_ident() if cell.per_thread else 0


def _by_owner(cells: Iterable[Cell]) -> dict[Cells, list[str]]:
    owners: dict[Cells, list[str]] = {}
    for cell in dict.fromkeys(cells):
        owners.setdefault(cell.owner, []).append(cell.name)
    return owners


def _put_back(values: dict[_Key, Any]) -> bool:
    """Write all cells; return whether some are another thread's, which only it can write.

    A second time if an interrupt or one owner's error cut the first short.
    """
    here = {key: value for key, value in values.items() if key[1] in (0, threading.get_ident())}
    try:
        _write(here)
    except BaseException:
        _write(here)
        raise
    return len(here) < len(values)


def _write(values: dict[_Key, Any]) -> None:
    owners: dict[Cells, dict[str, Any]] = {}
    for (cell, _), value in values.items():
        owners.setdefault(cell.owner, {})[cell.name] = value
    errors = []
    for owner, cells in owners.items():
        try:
            owner.write(cells)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _site() -> str:
    """Where outside this package the scope is entered."""
    package = os.path.dirname(os.path.dirname(__file__))
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
