"""Bytes and rates as people write them: ``8GiB``, ``500 MB``, ``25GB/s``."""

from __future__ import annotations

import math
import re

from polyattn.errors import OffloadError

__all__ = ["read_bytes", "said"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_LIMIT = 1 << 62
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([kmgt]?i?)b?(?:/s)?\s*", re.IGNORECASE)


def read_bytes(given: int | float | str, what: str = "budget") -> int:
    """Return a number of bytes, or of bytes a second.

    >>> read_bytes("8GiB"), read_bytes("500 MB"), read_bytes(4096)
    (8589934592, 500000000, 4096)
    """
    if isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given < _LIMIT:
        return int(given)
    found = _TEXT.fullmatch(given) if isinstance(given, str) else None
    unit = found[2].lower() if found else ""
    size = float(found[1]) * {**_UNITS, **_BINARY}.get(unit, math.inf) if found else math.inf
    if not size < _LIMIT:
        raise OffloadError(
            f"got {what}={given!r}, expected a number of bytes such as 8589934592, '8GiB' or '8GB'"
        )
    return int(size)


def said(nbytes: float) -> str:
    """Return bytes as a text of three digits.

    >>> said(8 * 2**30), said(1536), said(0)
    ('8.00 GiB', '1.50 KiB', '0 B')
    """
    size, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    if unit == "B":
        return f"{size:.0f} B"
    return f"{size:.{max(0, 2 - len(str(int(abs(size)))) + 1)}f} {unit}"
