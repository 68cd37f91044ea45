"""Which modules of a reference to keep whole: as deep as a budget of bytes lets it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from polyattn.trace.format.contents import Trace
from polyattn.trace.format.record import Record

__all__ = ["inside", "within_budget"]

_SIZES = {"float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "uint64": 8}


def inside(name: str, around: str) -> bool:
    """Whether a module is another one or in it.

    >>> inside("blocks.1.mlp", "blocks.1"), inside("blocks.10", "blocks.1"), inside("x", "")
    (True, False, True)
    """
    return not around or name == around or name.startswith(f"{around}.")


def within_budget(trace: Trace, names: Iterable[str], budget: int) -> list[str]:
    """Return those of `names` that are least deep in the tree, as many levels as together have
    tensors of at most `budget` bytes; at least one level.
    """
    known = sorted(set(names), key=_depth)
    kept: list[str] = []
    for depth in sorted({_depth(name) for name in known}):
        level = [name for name in known if _depth(name) == depth]
        if kept and _bytes(trace.records, {*kept, *level}) > budget:
            break
        kept += level
    return kept


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _bytes(records: Iterable[Record], names: Collection[str]) -> int:
    """What the distinct tensors of the modules take."""
    sizes: dict[int, int] = {}
    for record in records:
        if record.module in names and record.phase in ("in", "out"):
            seq = record.seq if record.same is None else record.same
            sizes[seq] = math.prod(record.shape) * _width(record.dtype)
    return sum(sizes.values())


def _width(dtype: str) -> int:
    if dtype in _SIZES:
        return _SIZES[dtype]
    return 4 if dtype.endswith("32") else 2 if dtype.endswith("16") else 1
