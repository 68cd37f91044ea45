"""JSON, one object a line, for whatever numbers a tensor holds: never a bare NaN or Infinity.

Faster than `json.dumps` on records, because floats are written with as many digits as they need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from json.encoder import encode_basestring_ascii
from math import isfinite
from typing import Any

from polyattn.errors import TraceError

__all__ = ["compact", "exact", "quoted"]

_DEPTH = 24


def compact(value: Mapping[str, Any]) -> str:
    """Return a line of JSON with floats of 9 digits, which is every digit of a float32.

    >>> compact({"mean": 1 / 3, "max": float("inf"), "shape": (2, 3)})
    '{"mean":0.333333333,"max":null,"shape":[2,3]}'
    """
    return _table(value, _COMPACT, _DEPTH)


def exact(value: Mapping[str, Any]) -> str:
    """Return a line of JSON with floats of all their digits, for float64.

    >>> exact({"mean": 1 / 3})
    '{"mean":0.3333333333333333}'
    """
    return _table(value, _EXACT, _DEPTH)


_Scalars = Mapping[type, Callable[[Any], str]]


def quoted(value: str) -> str:
    r"""Return a text as JSON; half a character, as in a file name that is no UTF-8, becomes ``?``.

    >>> quoted("ä" + chr(0xD800))
    '"\\u00e4?"'
    """
    if not value.isascii():
        value = value.encode("utf-8", "replace").decode("utf-8")
    return encode_basestring_ascii(value)


_SCALARS: dict[type, Callable[[Any], str]] = {
    int: int.__repr__,
    str: quoted,
    bool: lambda value: "true" if value else "false",
    type(None): lambda value: "null",
}
_COMPACT = {float: lambda value: f"{value:.9g}" if isfinite(value) else "null", **_SCALARS}
_EXACT = {float: lambda value: repr(value) if isfinite(value) else "null", **_SCALARS}


def _table(value: Mapping[Any, Any], scalars: _Scalars, depth: int) -> str:
    parts = []
    for name, one in value.items():
        write = scalars.get(type(one))
        text = write(one) if write else _nested(one, scalars, depth - 1)
        parts.append(f"{quoted(str(name))}:{text}")
    return "{" + ",".join(parts) + "}"


def _nested(value: Any, scalars: _Scalars, depth: int) -> str:
    if depth == 0:
        raise TraceError(f"got data nested deeper than {_DEPTH}, expected records of plain data.")
    if isinstance(value, Mapping):
        return _table(value, scalars, depth)
    if isinstance(value, list | tuple | set | frozenset):
        parts = []
        for one in value:
            write = scalars.get(type(one))
            parts.append(write(one) if write else _nested(one, scalars, depth - 1))
        return "[" + ",".join(parts) + "]"
    plainer = _plainer(value)
    write = scalars.get(type(plainer))
    return write(plainer) if write else _nested(plainer, scalars, depth - 1)


def _plainer(value: object) -> Any:
    """A number of NumPy or another library, or of a subclass, as Python's own."""
    if isinstance(value, bool | int | float | str):  # subclasses: IntEnum, numpy.float64, ...
        return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))
    for method in ("tolist", "item"):
        if callable(made := getattr(value, method, None)):
            return made()
    raise TraceError(
        f"got a {type(value).__name__} in a record, expected numbers, texts, lists and tables."
    )
