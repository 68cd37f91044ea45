"""The mask of the last queries alone, of those that a mask is about."""

from __future__ import annotations

from polyattn.masks import (
    And,
    Causal,
    Dense,
    Full,
    LeftPadding,
    Mask,
    Or,
    Padding,
    Segments,
    Window,
)
from polyattn.masks.payload import shape_of

__all__ = ["last_queries"]


def last_queries(mask: Mask, queries: int, first: int) -> Mask | None:
    """Return `mask` without the first of its queries, or None where it is not known how.

    `first`: how many of the `queries` are left out.

    >>> last_queries(Causal() & Window(left=3), 8, 7), last_queries(Causal("top_left"), 8, 7)
    (Causal() & Window(left=3, right=None), None)
    """
    if first == 0:
        return mask
    if isinstance(mask, (And, Or)):
        parts = [last_queries(part, queries, first) for part in mask.parts]
        if any(part is None for part in parts):
            return None
        return type(mask)(tuple(parts))  # type: ignore[arg-type]
    if isinstance(mask, (Full, LeftPadding, Window)):
        return mask
    if isinstance(mask, Causal):
        return mask if mask.align == "bottom_right" else None
    if isinstance(mask, Padding):
        return mask if mask.q_lengths is None else None
    if isinstance(mask, Segments):
        return Segments(mask.q_ids[..., first:], mask.kv_ids)
    if isinstance(mask, Dense):
        rows = shape_of(mask.mask)[-2:-1]
        return mask if rows in ((), (1,)) else Dense(mask.mask[..., first:, :])
    return None
