"""Which tensor of a call is which of the other side's: by path, else by what fits and agrees."""

from __future__ import annotations

import re
from collections.abc import Sequence

from polyattn.trace.compare.distance import distance
from polyattn.trace.format.record import Record

__all__ = ["pair"]

_FIRST = re.compile(r"(\[0\]|\.0)$")
_CLOSE = 1e-3


def pair(a: Sequence[Record], b: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return the tensors of one side with those of the other, in b's order.

    Equal paths first (``out`` and ``out[0]`` are equal where there is no other), unless their
    sizes differ and another has the size; then the rest, where values agree, else where sizes are
    the same and only one fits. What is left over is optional and not compared.
    """
    by_path = {one.tensor: one for one in a}
    found: dict[str, Record] = {}
    for other in b:
        one = by_path.get(other.tensor)
        if one is not None and not (one.n != other.n and _elsewhere(one, other, a, b)):
            found[other.tensor] = one
    rest_a = [one for one in a if one not in found.values()]
    for accept in (_agree, _only, _main):
        for other in b:
            if other.tensor in found:
                continue
            fits = [one for one in rest_a if accept(one, other, rest_a, b)]
            if fits:
                found[other.tensor] = fits[0]
                rest_a.remove(fits[0])
    return [(found[other.tensor], other) for other in b if other.tensor in found]


def _elsewhere(one: Record, other: Record, a: Sequence[Record], b: Sequence[Record]) -> bool:
    moved = [x for x in b if x.n == one.n] or [x for x in a if x.n == other.n]
    return bool(moved)


def _agree(one: Record, other: Record, rest: Sequence[Record], b: Sequence[Record]) -> bool:
    if one.n != other.n:
        return False
    found = distance(one, other)
    return found.comparable and found.error <= _CLOSE


def _only(one: Record, other: Record, rest: Sequence[Record], b: Sequence[Record]) -> bool:
    same = [x for x in rest if x.n == other.n and _floating(x) == _floating(other)]
    return same == [one] and sum(x.n == other.n for x in b) == 1


def _main(one: Record, other: Record, rest: Sequence[Record], b: Sequence[Record]) -> bool:
    """The first tensor of either side, where no path is alike."""
    return (
        one is rest[0]
        and other is b[0]
        and _FIRST.sub("", one.tensor) == _FIRST.sub("", other.tensor)
    )


def _floating(record: Record) -> bool:
    return "float" in record.dtype or record.dtype.startswith("complex")
