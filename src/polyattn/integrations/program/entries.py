"""What is heard of a program as plain data for lines of JSON, and back; wrong lines are errors."""

from __future__ import annotations

import json
import math
from typing import Any

from polyattn.errors import TuningError
from polyattn.integrations.arrays_as_text import StoredArray
from polyattn.integrations.program.asked import Case, Gain, Passed, Process, Ran, Unseen
from polyattn.problem import Problem

__all__ = [
    "case_of",
    "count",
    "gain_of",
    "passed_of",
    "plain",
    "plain_case",
    "process_of",
    "ran_of",
    "unseen_of",
]

_STATES = ("ended", "running", "cut short")


def plain(value: Ran | Passed | Process | Unseen | Gain) -> dict[str, Any]:
    """Return the fields of a value.

    >>> plain(Passed("inputs of 2 dims", "(2, 3)", 4))
    {'reason': 'inputs of 2 dims', 'shapes': '(2, 3)', 'calls': 4, 'process': 0}
    """
    return dict(vars(value))


def plain_case(case: Case) -> dict[str, Any]:
    """Return what a case is, without its calls."""
    return {
        "problem": json.loads(case.problem.to_json()),
        "strides": None if case.strides is None else [list(s) for s in case.strides],
        "needs_grad": list(case.needs_grad),
        "attn_mask": None if case.attn_mask is None else case.attn_mask.to_dict(),
        "refused": case.refused,
    }


def case_of(line: dict[str, Any]) -> Case:
    """Read what :func:`plain_case` wrote; schema 1 has no `refused`."""
    needs_grad = tuple(bool(x) for x in line["needs_grad"])
    if len(needs_grad) != 3:
        raise TuningError(f"got needs_grad={line['needs_grad']!r}; expected three booleans")
    problem = Problem.from_json(json.dumps(line["problem"]))
    mask = None if line["attn_mask"] is None else StoredArray.from_dict(line["attn_mask"])
    refused = {str(name): str(why) for name, why in dict(line.get("refused", {})).items()}
    return Case(problem, _strides(line["strides"]), needs_grad, mask, refused=refused)


def _strides(value: Any) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    found = tuple(tuple(s) for s in value)
    if len(found) != 3 or any(type(x) is not int or x < 0 for s in found for x in s):
        raise TuningError(f"got strides {value!r}; expected three lists of sizes >= 0")
    return found


def ran_of(line: dict[str, Any]) -> Ran:
    """Read what a call ran on; schema 1 knows one process."""
    fallback = line["fallback"]
    if not line["backend"]:
        raise ValueError("got a call that ran on nothing, expected a backend")
    return Ran(
        str(line["backend"]),
        str(line["version"]),
        str(line["source"]),
        str(line["reason"]),
        None if fallback is None else str(fallback),
        count(line.get("process", 0), "a place"),
    )


def passed_of(line: dict[str, Any]) -> Passed:
    """Read calls that came to no backend."""
    calls, process = count(line["calls"]), count(line.get("process", 0), "a place")
    return Passed(str(line["reason"]), str(line["shapes"]), calls, process)


def process_of(line: dict[str, Any]) -> Process:
    """Read a process."""
    threads, state = line["threads"], str(line["state"])
    if state not in _STATES:
        raise TuningError(f"got the state {state!r}; expected one of {', '.join(_STATES)}")
    return Process(
        str(line["name"]),
        str(line["group"]),
        count(line["pid"], "a process id"),
        count(line["parent"], "a process id"),
        state,
        None if threads is None else count(threads, "threads"),
    )


def unseen_of(line: dict[str, Any]) -> Unseen:
    """Read something that is out of sight."""
    process = line.get("process")
    return Unseen(
        str(line["what"]),
        str(line["why"]),
        count(line.get("times", 1), "times"),
        None if process is None else count(process, "a place"),
    )


def gain_of(line: dict[str, Any]) -> Gain:
    """Read a measured case."""
    seconds, stock = _times(line["seconds"]), _times(line["stock_seconds"])
    if len(seconds) != len(stock):
        raise TuningError(f"got {len(seconds)} and {len(stock)} rounds; expected pairs")
    threads, foreign = line["threads"], float(line["foreign"])
    return Gain(
        count(line["case"], "a place"),
        str(line["backend"]),
        seconds,
        stock,
        None if threads is None else count(threads, "threads"),
        foreign,
        str(line["note"]),
    )


def _times(value: Any) -> tuple[float, ...]:
    found = tuple(map(float, value))
    if not all(math.isfinite(x) and x > 0 for x in found):
        raise TuningError(f"got {value!r}; expected seconds > 0")
    return found


def count(value: Any, what: str = "calls") -> int:
    """Return a count that was read; TuningError for anything else."""
    if type(value) is not int or value < 0:
        raise TuningError(f"got {value!r} for {what}; expected a count >= 0")
    return value
