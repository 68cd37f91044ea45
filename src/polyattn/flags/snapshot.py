"""Snapshots: how every knob stood, as plain data that is stored, compared and read again.

A snapshot is a flat dictionary from the knob's name to its value, and one more entry,
``"polyattn.flags"``, with the schema, the framework, and the knobs that could not be read and why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyattn.errors import FlagsError

__all__ = [
    "ABSENT", "META", "SCHEMA", "Snapshot", "check", "diff", "lines", "make", "read", "read_all",
]  # fmt: skip

META = "polyattn.flags"
SCHEMA = 1
ABSENT = "<absent>"
"""What :func:`diff` shows for the side that does not have a knob."""

Snapshot = dict[str, Any]

_LIMIT = 64 * 2**20
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
            f"got {where} ({_short(data)}), expected a snapshot of flags with an entry {META!r}; "
            f"{_AGAIN}."
        )
    if type(meta.get("schema")) is not int or meta["schema"] != SCHEMA:
        raise FlagsError(
            f"got {where} with the schema {_short(meta.get('schema'))}, expected {SCHEMA}; "
            f"{_AGAIN} in this version of polyattn."
        )
    unreadable = meta.get("unreadable")
    named = _is_name(meta.get("framework"))
    if (
        not named
        or not isinstance(unreadable, dict)
        or not all(map(_is_reason, unreadable.items()))
    ):
        raise FlagsError(
            f"got {where} with the entry {META!r} damaged, expected a framework and a table "
            f"'unreadable' of reasons in it; {_AGAIN}."
        )
    for name, value in data.items():
        if not _is_name(name) or not (name == META or _plain(value)):
            raise FlagsError(
                f"got {where} with {_short(name)}: {_short(value)}, expected a name with None, a "
                f"bool, a finite number, a text or a list of these; {_AGAIN}."
            )
    return data


def _is_name(value: object) -> bool:
    """Not what would write more to a terminal than it says."""
    return isinstance(value, str) and value.isprintable()


def _is_reason(item: tuple[object, object]) -> bool:
    return _is_name(item[0]) and isinstance(item[1], str)


def _plain(value: object) -> bool:
    """What JSON keeps, and what can be compared and printed however hostile the file is."""
    if isinstance(value, list | tuple):
        return all(map(_scalar, value))
    return _scalar(value)


def _scalar(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


def _short(value: object) -> str:
    """A scalar as it is, and what may be large or deep by its type."""
    scalar = value is None or isinstance(value, bool | int | float | str)
    return f"{value!r:.80}" if scalar else f"a {type(value).__name__}"


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the knobs in which two snapshots differ, each with its value in `a` and in `b`.

    A knob that one side does not have is :data:`ABSENT` there; one that could not be read there
    shows why; one that neither could read is left out, whatever the reasons. Values that are equal
    in Python but of different types (``True`` and ``1``) differ.

    >>> a, b = make("torch", {"x": True}, {}), make("torch", {"x": False, "y": 2}, {})
    >>> diff(a, b)
    {'x': (True, False), 'y': ('<absent>', 2)}
    """
    first, second = (
        check(dict(side) if isinstance(side, Mapping) else side, name)
        for side, name in ((a, "a"), (b, "b"))
    )
    unknown = first[META]["unreadable"].keys() & second[META]["unreadable"].keys()
    shown = [_shown(first), _shown(second)]
    names = [name for name in dict.fromkeys([*shown[0], *shown[1]]) if name not in unknown]
    pairs = {name: (shown[0].get(name, ABSENT), shown[1].get(name, ABSENT)) for name in names}
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


def read(path: str | Path, framework: str | None = None) -> Snapshot:
    """Read the snapshot in a file: a snapshot itself, or a record that holds one under ``flags``.

    A record may hold one for each of several frameworks; `framework` says which is meant. A file of
    JSON lines (a trace) is read as its first line. Raises FlagsError for anything else.
    """
    found = read_all(path)
    if framework is None and len(found) > 1:
        raise FlagsError(
            f"got {path} with flags of {' and '.join(found)}, expected to be told which: name the "
            "framework."
        )
    name = framework or next(iter(found))
    if name not in found:
        raise FlagsError(f"got {path} with flags of {' and '.join(found)}, expected {name}.")
    return found[name]


def read_all(path: str | Path) -> dict[str, Snapshot]:
    """Read every snapshot in a file, by framework; as :func:`read`, and never an empty one."""
    data = _parse(path)
    if isinstance(data, dict) and isinstance(data.get("polyattn.trace"), dict):
        data = data["polyattn.trace"]  # the first line of a trace
    inner = data.get("flags") if isinstance(data, dict) and META not in data else None
    if not isinstance(inner, dict) or META in inner:
        one = check(inner if isinstance(inner, dict) else data, str(path))
        return {one[META]["framework"]: one}
    if not inner:
        raise FlagsError(
            f"got {path}, a record made where neither torch nor jax was loaded, expected flags."
        )
    found = {name: check(one, f"{path}, flags of {_short(name)},") for name, one in inner.items()}
    for name, one in found.items():
        said = one[META]["framework"]
        if said != name:
            raise FlagsError(
                f"got {path} with flags of {_short(said)} under {_short(name)}; {_AGAIN}."
            )
    return found


def _parse(path: str | Path) -> object:
    """The first line if it is JSON by itself (a trace may be huge), else the whole file."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.readline(_LIMIT)
            try:
                return json.loads(text)
            except (ValueError, RecursionError):
                text += file.read(_LIMIT)
    except (OSError, ValueError) as error:
        raise FlagsError(f"got {path}, which cannot be read ({error}); {_AGAIN}.") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "it is too large" if len(text) > _LIMIT else str(error) or "it is empty"
        raise FlagsError(f"got {path}, which is no JSON ({why}); {_AGAIN}.") from error
