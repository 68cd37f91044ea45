"""Snapshots: how every knob stood, as plain data that is stored, compared and read again.

A snapshot is a flat dictionary from the knob's name to its value, and one more entry,
``"polyattn.flags"``, with the schema, the framework, and the knobs that could not be read and why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyattn.errors import FlagsError

__all__ = ["ABSENT", "META", "SCHEMA", "Snapshot", "check", "diff", "lines", "make", "read"]

META = "polyattn.flags"
SCHEMA = 1
ABSENT = "<absent>"
"""What :func:`diff` shows for the side that does not have a knob."""

Snapshot = dict[str, Any]

_AGAIN = "write one with `polyattn flags snapshot > FILE`"


def make(framework: str, values: Mapping[str, Any], unreadable: Mapping[str, str]) -> Snapshot:
    """Return a snapshot of `framework` from the values read and the reasons for those not read."""
    meta = {"schema": SCHEMA, "framework": framework, "unreadable": dict(unreadable)}
    return {META: meta, **values}


def check(data: object, where: str = "the snapshot") -> Snapshot:
    """Return `data` if it is a snapshot; raise FlagsError that says what it is instead."""
    meta = data.get(META) if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(meta, dict):
        raise FlagsError(
            f"got {where}, expected a snapshot of flags with an entry {META!r}; {_AGAIN}."
        )
    if type(meta.get("schema")) is not int or meta["schema"] != SCHEMA:
        raise FlagsError(
            f"got {where} with the schema {meta.get('schema')!r}, expected {SCHEMA}; {_AGAIN} in "
            "this version of polyattn."
        )
    unreadable = meta.get("unreadable")
    if not isinstance(meta.get("framework"), str) or not isinstance(unreadable, dict):
        raise FlagsError(
            f"got {where} with the entry {META!r} damaged, expected a framework and a table "
            f"'unreadable' in it; {_AGAIN}."
        )
    return data


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the knobs in which two snapshots differ, each with its value in `a` and in `b`.

    A knob that one side does not have is :data:`ABSENT` there; one that could not be read shows
    why. Values that are equal in Python but of different types (``True`` and ``1``) differ.

    >>> a, b = make("torch", {"x": True}, {}), make("torch", {"x": False, "y": 2}, {})
    >>> diff(a, b)
    {'x': (True, False), 'y': ('<absent>', 2)}
    """
    sides = [_shown(check(dict(side), name)) for side, name in ((a, "a"), (b, "b"))]
    names = dict.fromkeys([*sides[0], *sides[1]])
    pairs = {name: (sides[0].get(name, ABSENT), sides[1].get(name, ABSENT)) for name in names}
    return {name: pair for name, pair in pairs.items() if not _same(*pair)}


def _shown(snapshot: Snapshot) -> dict[str, Any]:
    meta = snapshot[META]
    values = {name: value for name, value in snapshot.items() if name != META}
    return values | {name: f"<unreadable: {why}>" for name, why in meta["unreadable"].items()}


def _same(a: object, b: object) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return type(a) is type(b) and a == b


def lines(difference: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return a difference as text, a line a knob.

    >>> lines({"cudnn.benchmark": (False, True)})
    ['cudnn.benchmark: False and True']
    """
    return [f"{name}: {was!r} and {now!r}" for name, (was, now) in difference.items()]


def read(path: str | Path) -> Snapshot:
    """Read the snapshot in a file: a snapshot itself, or a record that holds one under ``flags``.

    A file of JSON lines (a trace) is read as its first line. Raises FlagsError for anything else.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FlagsError(f"got {path}, which cannot be read ({error}); {_AGAIN}.") from error
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = _first_line(text)
    if isinstance(data, dict) and META not in data and isinstance(data.get("flags"), dict):
        data = data["flags"]
        if META not in data:  # by framework
            data = next(iter(data.values()), data)
    return check(data, str(path))


def _first_line(text: str) -> object:
    try:
        return json.loads(text.partition("\n")[0])
    except (ValueError, RecursionError):
        return None
