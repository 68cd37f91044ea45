"""The files that a program's processes have written, put together into one record.

Each process has a file of lines and one of counts (see `ledger`). A line that a killed process did
not finish is none. What start-up said without a ledger is in files that end in ``.said``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polyattn.integrations.program.asked import Case, Passed, Process, Ran, Record, Unseen
from polyattn.integrations.program.entries import case_of, passed_of, process_of, ran_of, unseen_of
from polyattn.integrations.program.ledger import ENDED, Entry, Ledger, RanOn, is_locked

__all__ = ["MOST_CASES_OF_A_CLASS", "joined", "of_ledger", "record_of_folder"]

MOST_CASES_OF_A_CLASS = 2
_BYTES = 8


@dataclass
class _Fragment:
    """What one process wrote: entries with their places and counts; and its name, if it has one."""

    process: Process | None
    entries: list[tuple[int, int, Entry]] = field(default_factory=list)


def of_ledger(ledger: Ledger, program: Sequence[str] = ()) -> Record:
    """Return the record of this process alone."""
    placed = enumerate(zip(ledger.counts[1:], ledger.entries, strict=True), 1)
    return joined([_Fragment(None, [(at, *counted) for at, counted in placed])], program)


def record_of_folder(folder: Path, program: Sequence[str] = ()) -> Record:
    """Return the record of all processes that have written into a folder, in their order."""
    found = [_read(path) for path in sorted(folder.glob("*.jsonl"), key=_begun)]
    record = joined(_replaced([one for one in found if one.process is not None]), program)
    record.unseen += _said(folder)
    return record


def _begun(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _read(path: Path) -> _Fragment:
    counts_of = path.with_suffix(".counts")
    raw = counts_of.read_bytes() if counts_of.exists() else b""
    counts = memoryview(raw[: len(raw) // _BYTES * _BYTES]).cast("Q")
    found = _Fragment(None)
    for line in _whole_lines(path):
        kind, place = line.pop("kind"), line.pop("at", None)
        if kind == "process":
            found.process = process_of(line)
        elif isinstance(place, int) and place < len(counts):
            found.entries.append((place, counts[place], _entry(kind, line)))
    if found.process is not None:
        ended = len(counts) > ENDED and counts[ENDED] == 1
        state = "ended" if ended else "running" if is_locked(path) else "cut short"
        found.process = replace(found.process, state=state)
    return found


def _entry(kind: str, line: dict[str, Any]) -> Entry:
    if kind == "ran":
        return RanOn(line["case"], ran_of(line))
    if kind == "case":
        return case_of(line)
    return passed_of(line) if kind == "passed" else unseen_of(line)


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    *lines, _ = path.read_bytes().split(b"\n")
    for line in lines:
        yield json.loads(line)


def _replaced(found: list[_Fragment]) -> list[_Fragment]:
    """A process that was replaced by exec wrote twice under one number, and ended by itself."""
    last = {one.process.pid: one for one in found if one.process is not None}
    for one in found:
        if one.process is not None and last[one.process.pid] is not one:
            one.process = replace(one.process, state="ended")
    return found


def joined(fragments: Sequence[_Fragment], program: Sequence[str]) -> Record:
    """Join what several processes wrote: a problem that many had is one case."""
    record = Record([], [], tuple(program))
    known: dict[tuple[object, ...], Case] = {}
    of_class: Counter[str] = Counter()
    last: dict[str, Case] = {}
    for at, fragment in enumerate(fragments):
        if fragment.process is not None:
            record.processes.append(fragment.process)
        places: dict[int, Case] = {}
        for place, count, entry in fragment.entries:
            if isinstance(entry, Case):
                places[place] = _case(record, entry, known, of_class, last)
            elif isinstance(entry, RanOn):
                _add(places[entry.case], replace(entry.ran, process=at), count)
            elif isinstance(entry, Passed) and count:
                record.passed.append(replace(entry, calls=count, process=at))
            elif isinstance(entry, Unseen) and count:
                record.unseen.append(replace(entry, times=count, process=at))
    return record


def _case(
    record: Record,
    entry: Case,
    known: dict[tuple[object, ...], Case],
    of_class: Counter[str],
    last: dict[str, Case],
) -> Case:
    """Return the case that stands for an entry: the same one, or the last of its class."""
    if entry.same in known:
        return known[entry.same]
    of_class[entry.problem_class] += 1
    if of_class[entry.problem_class] > MOST_CASES_OF_A_CLASS:
        return last[entry.problem_class]
    kept = replace(entry, calls=0, ran=Counter())
    record.cases.append(kept)
    known[entry.same] = last[entry.problem_class] = kept
    return kept


def _add(case: Case, ran: Ran, count: int) -> None:
    if count:
        case.calls += count
        case.ran[ran] += count


def _said(folder: Path) -> Iterator[Unseen]:
    """What start-up said, in the order of the files; the same of several processes once."""
    times: Counter[Unseen] = Counter()
    for path in sorted(folder.glob("*.said")):
        for line in _whole_lines(path):
            times[unseen_of(line)] += 1
    for one, count in times.items():
        yield replace(one, times=count)
