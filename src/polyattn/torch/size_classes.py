"""Classes of sizes: calls that differ in batch and lengths alone, and run the same kernel.

A cache of keys that grows by one at each step is a new shape at each step. What is chosen for one
of them is right for all of a class: batch and lengths between the same powers of two, of which
measured times (`polyattn.tuning.lookup.problem_class`) and heuristics see no more either, the same
one of T < S, T = S, T > S, and the same heads and head dims. Few keys have no class, since kernels
treat them one by one; neither have packed rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polyattn.masks import KINDS_BY_LENGTH, Mask
from polyattn.masks.simplify import simplify

__all__ = ["FEWEST", "LAYOUTS", "Span", "size_class", "span_of"]

LAYOUTS = ("BNTH", "BTNH")
"""The layouts with a batch, whose sizes fall into classes."""

FEWEST = 17
"""The least keys that a class holds; every limit of a kernel below is no power of two, or it."""

MOST_BATCH = 1 << 15
"""The largest batch that has a class: the grids of kernels on CUDA end soon after."""


class Span(NamedTuple):
    """The key lengths, both included, for which a mask simplifies to the same."""

    low: int
    high: int


def size_class(layout: str, q: Any, k: Any, v: Any) -> tuple[int, ...] | None:
    """Return the class that three shapes fall into, or None where there is none.

    >>> size_class("BNTH", (1, 8, 1, 64), (1, 2, 300, 64), (1, 2, 300, 64))
    (1, 1, 512, -1, 8, 2, 64, 64)
    """
    if layout not in LAYOUTS or not len(q) == len(k) == len(v) == 4:
        return None
    row = 1 if layout == "BTNH" else 2
    head = 3 - row
    b, t, s = q[0], q[row], k[row]
    if (k[0], k[3]) != (b, q[3]) or (v[0], v[row], v[head]) != (b, s, k[head]):
        return None
    if not 1 <= b <= MOST_BATCH or t < 1 or s < FEWEST:
        return None
    order = (t > s) - (t < s)
    return (_up(b), _up(t), _up(s), order, q[head], k[head], q[3], v[3])


def _up(size: int) -> int:
    return 1 << (size - 1).bit_length()


def span_of(mask: Mask | None, q_len: int, kv_len: int) -> Span | None:
    """Return the key lengths of the class for which `mask` is what it is for these lengths.

    None where that also depends on the query length, which then has no class. Each law of
    `polyattn.masks.simplify` asks whether one length passes a number: the ends of a range tell.

    >>> from polyattn import Window
    >>> span_of(None, 1, 300), span_of(Window(left=280), 1, 300)
    (Span(low=257, high=512), Span(low=282, high=512))
    """
    high = _up(kv_len)
    low = max(high // 2 + 1, FEWEST)
    if mask is None or mask.kinds.isdisjoint(KINDS_BY_LENGTH):
        return Span(low, high)
    if q_len == kv_len:
        return _same(mask, low, high, kv_len, lambda s: (s, s))
    t_high = _up(q_len)
    t_low = t_high if t_high <= 2 else t_high // 2 + 1
    if q_len < kv_len:  # each length is tried where the other leaves it most room
        low = max(low, t_low + 1)
        t, ends = t_low, ((t_low, high), (min(t_high, high - 1), high))
    else:
        high = min(high, t_high - 1)
        t, ends = t_high, ((max(t_low, low + 1), low), (t_high, low))
    if _simple(mask, *ends[0]) != _simple(mask, *ends[1]):
        return None
    return _same(mask, low, high, kv_len, lambda s: (t, s))


def _same(mask: Mask, low: int, high: int, here: int, lengths: Any) -> Span:
    """Narrow a range of key lengths to those around `here` where the mask simplifies alike."""
    wanted = _simple(mask, *lengths(here))

    def last(inside: int, outside: int) -> int:
        if _simple(mask, *lengths(outside)) == wanted:
            return outside
        while abs(outside - inside) > 1:
            middle = (inside + outside) // 2
            if _simple(mask, *lengths(middle)) == wanted:
                inside = middle
            else:
                outside = middle
        return inside

    return Span(last(here, low), last(here, high))


def _simple(mask: Mask, q_len: int, kv_len: int) -> str | None:
    found = simplify(mask, q_len, kv_len)
    return None if found is None else found.signature
