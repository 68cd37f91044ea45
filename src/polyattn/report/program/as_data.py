"""A record as plain data: everything that the other reports are made of."""

from __future__ import annotations

from typing import Any

from polyattn.integrations.program.asked import Record
from polyattn.report.program.gained import gained
from polyattn.report.program.summary import classes, process_of

__all__ = ["to_dict"]


def to_dict(record: Record) -> dict[str, Any]:
    """Return JSON-able data of a record.

    >>> from polyattn.integrations.program.asked import Passed
    >>> to_dict(Record([], [Passed("inputs of 2 dims", "(2, 3)", 4)]))["calls"]
    4
    """
    return {
        "program": list(record.program),
        "machine": record.machine,
        "calls": record.calls,
        "processes": [
            {**vars(process), "calls": dict(_named(process_of(record, at)))}
            for at, process in enumerate(record.processes)
        ],
        "classes": [
            {
                "problem": str(one.cases[0].problem),
                "problem_class": one.cases[0].problem_class,
                "calls": one.calls,
                "ran": [
                    {**vars(ran), "calls": calls}
                    for case in one.cases
                    for ran, calls in case.ran.items()
                ],
                "refused": one.cases[0].refused,
                "gain": None if one.gain is None else vars(one.gain),
            }
            for one in classes(record)
        ],
        "left_to_torch": [vars(passed) for passed in record.passed],
        "unseen": [vars(unseen) for unseen in record.unseen],
        "gained": gained(record).to_dict() if record.gains else None,
    }


def _named(calls: dict[str, int]) -> dict[str, int]:
    return {name or "not routed": count for name, count in calls.items()}
