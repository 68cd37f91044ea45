"""What a value read from a file must be: each check returns it or raises Malformed with a reason.

Files come from other programs and other people, so nothing of them is taken on trust: no number is
infinite, no text breaks an encoder, nothing is nested deeper than it may be printed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

__all__ = [
    "LARGEST_SIZE", "LONGEST_TEXT", "Malformed", "boolean", "integer", "number", "parse", "plain",
    "shape", "short", "table", "text",
]  # fmt: skip

LARGEST_SIZE = 2**62
LONGEST_TEXT = 4096
"""Characters of a name: of a module, a class, a tensor."""
_DIMENSIONS = 64
_DEPTH = 32


class Malformed(ValueError):
    """A line or value that is not as the format says; the reader adds the file and the line."""


def short(value: object) -> str:
    """Return a scalar as it is, shortened, and what may be large or deep by its type."""
    if isinstance(value, str):
        return f"{value[:60]!r}"
    scalar = value is None or isinstance(value, bool | float)
    if scalar or (isinstance(value, int) and value.bit_length() < 200):
        return repr(value)
    return f"a {type(value).__name__}"


def parse(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line."""
    try:
        found = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise Malformed(f"bytes that are no UTF-8 ({error.reason} at {error.start})") from error
    except RecursionError as error:
        raise Malformed("JSON that is nested too deep") from error
    except Malformed:
        raise
    except ValueError as error:
        raise Malformed(f"no JSON ({error})"[:200]) from error
    if not isinstance(found, dict):
        raise Malformed(f"{short(found)}, not a JSON object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise Malformed(f"{name}, which JSON does not have")


def integer(value: object, name: str, low: int = 0, high: int = LARGEST_SIZE) -> int:
    """Return an integer from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise Malformed(f"{name} {short(value)}, not an integer from {low} to {high}")
    return value


def number(value: object, name: str) -> float | None:
    """Return a finite number, or None."""
    if value is None:
        return None
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is int and value.bit_length() <= 1000:
        return float(value)
    raise Malformed(f"{name} {short(value)}, not a finite number or null")


def text(value: object, name: str, longest: int = LONGEST_TEXT) -> str:
    """Return text that can be encoded again."""
    if type(value) is not str or len(value) > longest:
        raise Malformed(f"{name} {short(value)}, not a text of at most {longest} characters")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Malformed(f"{name} with half a character (a lone surrogate)") from None
    return value


def boolean(value: object, name: str) -> bool:
    """Return True or False."""
    if type(value) is not bool:
        raise Malformed(f"{name} {short(value)}, not true or false")
    return value


def shape(value: object, name: str) -> tuple[int, ...]:
    """Return the sizes of a tensor that could exist."""
    if type(value) is not list or len(value) > _DIMENSIONS:
        raise Malformed(f"{name} {short(value)}, not a list of at most {_DIMENSIONS} sizes")
    sizes = tuple(integer(size, f"{name} with") for size in value)
    if math.prod(sizes) > LARGEST_SIZE:
        raise Malformed(f"{name} of more than 2**62 elements")
    return sizes


def table(value: object, name: str) -> dict[str, Any]:
    """Return a JSON object whose names are text; :func:`plain` checks what is in it."""
    if type(value) is not dict:
        raise Malformed(f"{name} {short(value)}, not a JSON object")
    return value


def plain(value: Any, name: str) -> Any:
    """Return any JSON of bounded depth without infinite numbers or half characters."""
    level: Iterable[Any] = [value]
    for _ in range(_DEPTH):
        below: list[Any] = []
        for one in level:
            if type(one) is dict:
                for key in one:
                    text(key, f"{name}: a name")
                below.extend(one.values())
            elif type(one) is list:
                below.extend(one)
            elif type(one) is str:
                text(one, name, longest=1 << 20)
            elif type(one) is float:
                number(one, name)
        if not below:
            return value
        level = below
    raise Malformed(f"{name} nested deeper than {_DEPTH}")
