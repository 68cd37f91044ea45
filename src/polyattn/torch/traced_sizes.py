"""Batch and lengths of a traced call: of which class they are, and what of that is guarded.

A compiler gives a size that stays open as a symbol, with the number that it has in this call for a
hint. A choice is made for the hint, and guarded as far as it counts: see
`polyattn.torch.open_lengths`. A size that the caller marked as dynamic is never guarded.
"""

from __future__ import annotations

from typing import Any

from polyattn.masks import Causal, Mask
from polyattn.masks.simplify import simplify
from polyattn.torch.internals import are_sizes_marked, hint_of, holds, is_known

__all__ = ["any_empty", "bounds_of", "class_of", "may_be", "simplified"]

_UNKNOWN = 64
"""Stands for a size of which a compiler has not even a hint."""
_MOST = 1 << 24


def bounds_of(b: Any, t: Any, s: Any, found: Any, asked: Any, limits: Any) -> Any:
    """Return the classes of batch and queries, the order of T and S, the class of keys, and more.

    Classes are powers of two; that of the queries is 0 where they are as many as keys. Then come
    the backends that may be chosen, None for all, and whether keys must not be counted. `limits`:
    see `polyattn.torch.open_lengths.limits_of`.
    """
    order = 0 if t == s else -1 if t < s else 1
    hints, is_open, unknown = [], [], False
    for size in (b, t, s):
        hint = hint_of(size)
        still = is_known(size == hint)
        if hint == 0 and not still:
            hint, unknown = _UNKNOWN, True
        hints.append(class_of(hint))
        is_open.append(not still)
    here = (hints[0], 0 if order == 0 else hints[1], order, hints[2])
    if 0 in hints or True not in is_open:
        return (*here, None, False)
    ends = None
    if unknown or are_sizes_marked():
        ends = tuple([_ends_of(size) for size in (b, t, s)])
    allowed, ranges, prepared_at = limits(found, here, tuple(is_open), ends, asked)
    if ranges:  # one for each size, and maybe one for how many scores there are
        for size, (low, high) in zip((b, t, s), ranges[:3], strict=True):
            _guard(size, low, high)
    if len(ranges) > 3:
        _guard(b * t * s, *ranges[3])
    return (*prepared_at, allowed, ends is not None and not ranges and is_open[2])


def any_empty(sizes: Any) -> bool:
    """Say whether one of the sizes is 0; where that is not known yet, kernels answer for it."""
    for size in sizes:  # noqa: SIM110  # fewer names to guard
        if holds(size == 0):
            return True
    return False


def simplified(mask: Mask, t: Any, s: Any) -> Mask | None:
    """Return a mask as simple as the lengths make it; as simple as marked ones make it all."""
    if not are_sizes_marked() or (is_known(t == hint_of(t)) and is_known(s == hint_of(s))):
        return simplify(mask, t, s)
    return Causal("top_left") if isinstance(mask, Causal) and is_known(t == s) else mask


def may_be(size: Any, other: Any) -> bool:
    """Say whether it is worth asking if two sizes are one: that they are not is left unguarded."""
    hint = hint_of(size)
    return hint == 0 or hint == hint_of(other)


def class_of(size: int) -> int:
    """Return the next power of two, by comparisons only: they guard a range of a symbolic size."""
    bound = 1
    while bound < size:
        bound *= 2
    return bound if size else 0


def _ends_of(size: Any) -> tuple[int, int]:
    """Return the classes of the least and the largest that a size may be, guarding nothing."""
    low, high = 1, 1
    while low < _MOST and is_known(size > low):
        low *= 2
    while high < _MOST and not is_known(size <= high):
        high *= 2
    return low, high


def _guard(size: Any, low: int, high: int) -> None:
    """Have a compiler guard that a size is above `low` and up to `high`; 0: no limit."""
    if low and size > low:
        pass
    if high and size <= high:
        pass
