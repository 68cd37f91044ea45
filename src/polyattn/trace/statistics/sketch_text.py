"""A sketch as text: the base64 of 64 little-endian float32, scaled where float32 has no room.

Sketches whose largest bucket is from 2**-64 to 2**127 (nearly all) are the plain base64, 344
characters. Any other is ``"E:<base64>"``: the numbers of the base64 times 2**E. So values above
float32's range, and those below it, keep the full precision of float32.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Sequence

from polyattn.errors import TraceError
from polyattn.trace.statistics.schema import BUCKETS, LARGEST, LEAST_PLAIN, MOST_PLAIN

__all__ = ["BUCKETS", "pack", "unpack"]

_LETTERS = 4 * math.ceil(4 * BUCKETS / 3)
_FLOATS = struct.Struct(f"<{BUCKETS}f")
_TEXT = re.compile(rf"(?:(-?[0-9]{{1,4}}):)?([A-Za-z0-9+/=]{{{_LETTERS}}})")
_EXPONENTS = range(-1200, 1100)


def pack(buckets: Sequence[float]) -> str:
    """Return 64 finite numbers as text, rounded to float32.

    >>> pack([0.0] * 64)[:8], pack([1e300] * 64)[:8]
    ('AAAAAAAA', '997:5CE/')
    >>> f"{unpack(pack([1e300] * 64))[0]:.6e}"
    '1.000000e+300'
    """
    if len(buckets) != BUCKETS or not all(map(math.isfinite, buckets)):
        raise TraceError(f"got a sketch {buckets!r:.80}, expected {BUCKETS} finite numbers.")
    largest = max(map(abs, buckets))
    if largest == 0 or LEAST_PLAIN <= largest < MOST_PLAIN:
        return base64.b64encode(_FLOATS.pack(*buckets)).decode("ascii")
    exponent = math.frexp(largest)[1]
    scaled = _FLOATS.pack(*(_scale(value, -exponent) for value in buckets))
    return f"{exponent}:{base64.b64encode(scaled).decode('ascii')}"


def unpack(text: str) -> tuple[float, ...]:
    """Return the 64 numbers; raise :class:`TraceError` for text that no sketch is written as."""
    found = _TEXT.fullmatch(text) if isinstance(text, str) else None
    exponent = int(found[1] or 0) if found else None
    if found is None or exponent not in _EXPONENTS:
        raise TraceError(f"got a sketch {text!r:.60}, expected the base64 of {BUCKETS} float32.")
    try:
        values = _FLOATS.unpack(base64.b64decode(found[2], validate=True))
    except (ValueError, struct.error) as error:
        raise TraceError(
            f"got a sketch {text!r:.60}, expected the base64 of {BUCKETS} float32 ({error})."
        ) from error
    if not all(map(math.isfinite, values)):
        raise TraceError(f"got a sketch {text!r:.60} with NaN or infinity, expected numbers.")
    return tuple(_scale(value, exponent) for value in values) if exponent else values


def _scale(value: float, exponent: int) -> float:
    """``value * 2**exponent``, the largest number of its sign where float64 ends."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(LARGEST, value)
