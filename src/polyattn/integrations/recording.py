"""What a program asked of attention: its problems with their strides, masks, gradients and counts.

A record is a file of JSON Lines: a header, one line for each case, one for each kind of call that
went to torch, and an end line that shows whether it is whole.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import InvalidProblem, TuningError
from polyattn.integrations.arrays_as_text import StoredArray, take
from polyattn.integrations.sdpa_patch import SdpaCall
from polyattn.problem import Problem
from polyattn.selection import Selection
from polyattn.tuning.lookup import problem_class
from polyattn.tuning.values import strict_json

__all__ = ["Case", "Passed", "Record", "Recorder", "Ran", "read_record", "write_record"]

APPLICATION = "polyattn-record"
SCHEMA = 1
MOST_CASES_OF_A_CLASS = 2
_MOST_HEARD = 4096
_ADVICE = "pass a file that `polyattn run --record FILE` wrote, or record again"


@dataclass(frozen=True)
class Ran:
    """What a call ran on, and why."""

    backend: str
    version: str
    source: str
    reason: str
    fallback: str | None = None


@dataclass
class Case:
    """One problem that a program really had, and what is needed to have it again.

    `strides` of query, key and value (None where the arrays were not seen: compiled code),
    `needs_grad` of the three, and the mask or bias as it was passed.
    """

    problem: Problem
    strides: tuple[tuple[int, ...], ...] | None
    needs_grad: tuple[bool, ...]
    attn_mask: StoredArray | None
    calls: int = 0
    ran: Counter[Ran] = field(default_factory=Counter)

    @property
    def problem_class(self) -> str:
        """The class under which times are stored."""
        return problem_class(self.problem)


@dataclass(frozen=True)
class Passed:
    """Calls that went to torch itself."""

    reason: str
    shapes: str
    calls: int


@dataclass
class Record:
    """Everything that was heard of one run."""

    cases: list[Case]
    passed: list[Passed]
    program: tuple[str, ...] = ()

    @property
    def calls(self) -> int:
        """All calls, those that went to torch itself included."""
        return sum(c.calls for c in self.cases) + sum(p.calls for p in self.passed)


@dataclass(frozen=True)
class _Heard:
    """A selection, which is kept so that its identity tells it, and the cases of its class."""

    selection: Selection
    ran: Ran
    cases: dict[Any, Case]

    @property
    def last(self) -> Case:
        """The case that calls are counted to for which there is no other."""
        return next(reversed(self.cases.values()))


class Recorder:
    """A listener of :class:`~polyattn.integrations.sdpa_patch.route_sdpa` that keeps it all.

    Of each class of problems the first few cases are kept as they were; calls of further ones
    are counted to the last of them, so that a growing cache of keys does not grow the record.
    """

    def __init__(self) -> None:
        self._of_class: dict[str, dict[Any, Case]] = {}
        self._heard: dict[int, _Heard] = {}
        self._passed: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def ran(self, selection: Selection, call: SdpaCall | None) -> None:
        """Count a call, and keep its arrays' facts if it is of a new kind."""
        problem = selection.problem
        if problem is None:
            return
        chosen = selection.of_class or selection
        strides, needs_grad = _strides(call), _needs_grad(call)
        key = problem.batch, problem.q_len, problem.kv_len, strides, needs_grad
        with self._lock:
            heard = self._heard.get(id(chosen)) or self._hear(chosen)
            case = heard.cases.get(key)
            if case is None and len(heard.cases) >= MOST_CASES_OF_A_CLASS:
                case = heard.last
            elif case is None:
                mask = call.attn_mask if call is not None else None
                stored = take(mask) if isinstance(mask, Tensor) else None
                case = heard.cases[key] = Case(problem, strides, needs_grad, stored)
            case.calls += 1
            case.ran[heard.ran] += 1

    def _hear(self, selection: Selection) -> _Heard:
        """Return what is known of the calls of a selection, for further ones to be quick."""
        assert selection.problem is not None
        if len(self._heard) >= _MOST_HEARD:
            self._heard.clear()
        cases = self._of_class.setdefault(problem_class(selection.problem), {})
        ran = Ran(
            selection.backend,
            selection.version,
            str(selection.source),
            selection.reason,
            selection.fallback,
        )
        heard = self._heard[id(selection)] = _Heard(selection, ran, cases)
        return heard

    def passed(self, reason: str, call: SdpaCall | None) -> None:
        """Count a call that went to torch itself."""
        shapes = [] if call is None else [str(tuple(getattr(x, "shape", "?"))) for x in call[:3]]
        with self._lock:
            self._passed[reason, ", ".join(shapes)] += 1

    def record(self, program: Sequence[str] = ()) -> Record:
        """Return what was heard so far."""
        with self._lock:
            passed = [Passed(*what, calls) for what, calls in self._passed.items()]
            cases = [case for known in self._of_class.values() for case in known.values()]
            return Record(cases, passed, tuple(program))


def _strides(call: SdpaCall | None) -> tuple[tuple[int, ...], ...] | None:
    return None if call is None else tuple(x.stride() for x in call[:3])


def _needs_grad(call: SdpaCall | None) -> tuple[bool, ...]:
    if call is None or not torch.is_grad_enabled():
        return (False, False, False)
    return tuple(x.requires_grad for x in call[:3])


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
    yield {"application": APPLICATION, "schema": SCHEMA, "program": list(record.program)}
    for case in record.cases:
        yield {
            "kind": "case",
            "problem": json.loads(case.problem.to_json()),
            "strides": None if case.strides is None else [list(s) for s in case.strides],
            "needs_grad": list(case.needs_grad),
            "attn_mask": None if case.attn_mask is None else case.attn_mask.to_dict(),
            "calls": case.calls,
            "ran": [{**vars(ran), "calls": calls} for ran, calls in case.ran.items()],
        }
    for passed in record.passed:
        yield {"kind": "passed", **vars(passed)}
    yield {"kind": "end", "lines": len(record.cases) + len(record.passed)}


def read_record(path: str | os.PathLike[str]) -> Record:
    """Read a record; TuningError that names the line for a file that is none, or is damaged."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TuningError(f"record: got {str(path)!r}: {error}; {_ADVICE}") from error
    plain = [_decoded(path, number, line) for number, line in enumerate(lines, 1)]
    head = plain[0] if plain else {}
    if head.get("application") != APPLICATION:
        raise TuningError(
            f"record: got {str(path)!r}, which does not begin with application "
            f"{APPLICATION!r}; {_ADVICE}"
        )
    if head.get("schema") != SCHEMA:
        raise TuningError(
            f"record: got schema {head.get('schema')!r}; expected {SCHEMA}; record again"
        )
    if plain[-1] != {"kind": "end", "lines": len(plain) - 2}:
        raise TuningError(f"record: got {str(path)!r}, which was cut short; record again")
    record = Record([], [], tuple(map(str, head.get("program") or ())))
    for number, line in enumerate(plain[1:-1], 2):
        try:
            _add(record, line)
        except (TuningError, InvalidProblem, KeyError, TypeError, ValueError) as error:
            raise TuningError(f"record: {path}, line {number}: {error}; {_ADVICE}") from None
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
    if kind == "passed":
        record.passed.append(
            Passed(str(line["reason"]), str(line["shapes"]), _count(line["calls"]))
        )
        return
    if kind != "case":
        raise TuningError(f"got a line of kind {kind!r}; expected case, passed or end")
    ran = Counter(
        {
            Ran(*(entry[name] for name in Ran.__dataclass_fields__)): _count(entry["calls"])
            for entry in line["ran"]
        }
    )
    needs_grad = tuple(bool(x) for x in line["needs_grad"])
    problem = Problem.from_json(json.dumps(line["problem"]))
    if len(needs_grad) != 3:
        raise TuningError(f"got needs_grad={line['needs_grad']!r}; expected three booleans")
    mask = None if line["attn_mask"] is None else StoredArray.from_dict(line["attn_mask"])
    strides = _checked_strides(line["strides"])
    record.cases.append(Case(problem, strides, needs_grad, mask, _count(line["calls"]), ran))


def _checked_strides(value: Any) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    found = tuple(tuple(s) for s in value)
    if len(found) != 3 or any(type(x) is not int or x < 0 for s in found for x in s):
        raise TuningError(f"got strides {value!r}; expected three lists of sizes >= 0")
    return found


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TuningError(f"got {value!r} calls; expected a count >= 0")
    return value
