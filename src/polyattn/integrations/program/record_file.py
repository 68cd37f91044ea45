"""A record as a file of JSON Lines, for tuning, for reports later, and for other programs.

A header, a line for each process, case, kind of call that came to no backend, thing out of sight
and measured case, and an end line that shows whether it is whole. Schema 2 added the processes and
what is out of sight; files of schema 1 are read.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyattn.errors import InvalidProblem, TuningError
from polyattn.integrations.program.asked import Record
from polyattn.integrations.program.entries import (
    case_of,
    count,
    gain_of,
    passed_of,
    plain,
    plain_case,
    process_of,
    ran_of,
    unseen_of,
)
from polyattn.tuning.values import strict_json

__all__ = ["read_record", "write_record"]

APPLICATION = "polyattn-record"
SCHEMA = 2
_READ = (1, 2)
_ADVICE = "pass a file that `polyattn run --record FILE` wrote, or record again"


def write_record(record: Record, path: str | os.PathLike[str]) -> None:
    """Write a record, whole or not at all; TuningError if the file cannot be written."""
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        part.write_text("".join(f"{json.dumps(x)}\n" for x in _lines(record)), encoding="utf-8")
        part.replace(target)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise TuningError(
            f"record: got {str(target)!r}, which cannot be written ({error}); name another file"
        ) from error


def _lines(record: Record) -> Iterable[dict[str, Any]]:
    body = [
        *({"kind": "process", **plain(one)} for one in record.processes),
        *(
            {
                "kind": "case",
                **plain_case(case),
                "calls": case.calls,
                "ran": [{**plain(ran), "calls": calls} for ran, calls in case.ran.items()],
            }
            for case in record.cases
        ),
        *({"kind": "passed", **plain(one)} for one in record.passed),
        *({"kind": "unseen", **plain(one)} for one in record.unseen),
        *({"kind": "gain", **plain(one)} for one in record.gains),
    ]
    yield {
        "application": APPLICATION,
        "schema": SCHEMA,
        "program": list(record.program),
        "machine": record.machine,
    }
    yield from body
    yield {"kind": "end", "lines": len(body)}


def read_record(path: str | os.PathLike[str]) -> Record:
    """Read a record; TuningError that names the line for a file that is none, or is damaged."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TuningError(f"record: got {str(path)!r}: {error}; {_ADVICE}") from error
    decoded = [_decoded(path, number, line) for number, line in enumerate(lines, 1)]
    head = decoded[0] if decoded else {}
    if head.get("application") != APPLICATION:
        raise TuningError(
            f"record: got {str(path)!r}, which does not begin with application "
            f"{APPLICATION!r}; {_ADVICE}"
        )
    if head.get("schema") not in _READ:
        raise TuningError(
            f"record: got schema {head.get('schema')!r}; expected {' or '.join(map(str, _READ))}; "
            "record again, or read it with the polyattn that wrote it"
        )
    if decoded[-1] != {"kind": "end", "lines": len(decoded) - 2}:
        raise TuningError(f"record: got {str(path)!r}, which was cut short; record again")
    program = head.get("program") or []
    if not isinstance(program, list):
        raise TuningError(f"record: got the program {program!r:.60}, expected a list; {_ADVICE}")
    machine = str(head.get("machine", ""))
    record = Record([], [], tuple(map(str, program)), machine=machine)
    for number, line in enumerate(decoded[1:-1], 2):
        try:
            _add(record, line)
        except (TuningError, InvalidProblem, KeyError, TypeError, ValueError) as error:
            said = f"no member {error}" if isinstance(error, KeyError) else error
            raise TuningError(f"record: {path}, line {number}: {said}; {_ADVICE}") from None
    _check_places(record, path)
    return record


def _decoded(path: Any, number: int, line: str) -> dict[str, Any]:
    try:
        found = strict_json(line)
    except (ValueError, RecursionError) as error:
        raise TuningError(
            f"record: {path}, line {number}: got {line[:60]!r}; expected JSON ({error}); {_ADVICE}"
        ) from None
    if not isinstance(found, dict):
        raise TuningError(f"record: {path}, line {number}: expected an object; {_ADVICE}")
    return found


def _add(record: Record, line: dict[str, Any]) -> None:
    kind = line.pop("kind", None)
    if kind == "case":
        case = case_of(line)
        case.calls = count(line["calls"])
        case.ran = Counter({ran_of(entry): count(entry["calls"]) for entry in line["ran"]})
        record.cases.append(case)
    elif kind == "passed":
        record.passed.append(passed_of(line))
    elif kind == "process":
        record.processes.append(process_of(line))
    elif kind == "unseen":
        record.unseen.append(unseen_of(line))
    elif kind == "gain":
        record.gains.append(gain_of(line))
    else:
        raise TuningError(
            f"got a line of kind {kind!r}; expected case, passed, process, unseen, gain or end"
        )


def _check_places(record: Record, path: Any) -> None:
    """Raise where a line points at a process or a case that is not there."""
    named = {ran.process for case in record.cases for ran in case.ran}
    named |= {one.process for one in record.passed}
    named |= {one.process for one in record.unseen if one.process is not None}
    processes = len(record.processes) or 1  # schema 1 has no lines of them
    if any(place >= processes for place in named):
        raise TuningError(
            f"record: {path}: got process {max(named)}; expected one of {processes}; {_ADVICE}"
        )
    if any(gain.case >= len(record.cases) for gain in record.gains):
        raise TuningError(f"record: {path}: got times of a case that is not there; {_ADVICE}")
