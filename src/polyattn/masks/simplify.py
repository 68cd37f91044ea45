"""The laws by which a mask becomes simpler once the lengths are known; they change no result."""

from __future__ import annotations

from polyattn.masks import And, Causal, Chunked, Dilated, Full, Mask, Not, Window
from polyattn.masks.base import is_nothing

__all__ = ["key_range", "sees_every_row", "simplify"]


def simplify(mask: Mask | None, q_len: int, kv_len: int) -> Mask | None:
    """Return an equal mask for these lengths, as simple as the laws make it; None = no mask.

    A causal mask over equal lengths is written ``top_left`` (both alignments agree there).

    >>> simplify(Causal(), 4, 4), simplify(Causal(), 1, 9), simplify(Window(left=9), 4, 4)
    (Causal('top_left'), None, None)
    >>> simplify(Chunked(8) & Causal(), 1, 9), simplify(Chunked(8) & Causal(), 8, 8)
    (Chunked(8), Causal('top_left'))
    """
    if mask is None:
        return None
    top_left = mask.align == "top_left" or q_len == kv_len
    leaves = mask.leaves()
    # beside a mask that is always bottom_right the causal masks keep that name
    rename = q_len == kv_len and not any(leaf.only_align for leaf in leaves)
    taking = any(leaf.align is None and leaf.takes_align for leaf in leaves)
    if mask.align == "top_left" and q_len != kv_len and taking:
        return mask  # without the causal mask these would be measured bottom-right
    simple = _simplify(mask, q_len, kv_len, 0 if top_left else kv_len - q_len, rename)
    return None if isinstance(simple, Full) else simple


def _simplify(mask: Mask, q_len: int, kv_len: int, offset: int, rename: bool) -> Mask:
    if not mask.parts:
        simple = mask.simplified(q_len, kv_len, offset)
        return Causal("top_left") if rename and isinstance(simple, Causal) else simple
    parts = [_simplify(part, q_len, kv_len, offset, rename) for part in mask.parts]
    if isinstance(mask, Not):
        return parts[0].__invert__()  # which a compiler follows, unlike the sign
    if isinstance(mask, And):
        for part in parts:
            if is_nothing(part):
                return part
    joined = parts[0]
    for part in parts[1:]:
        joined = joined & part if isinstance(mask, And) else joined | part
    return joined


def key_range(mask: Mask | None, q_len: int, kv_len: int) -> tuple[int, int]:
    """Return the bounds outside of which no query sees a key, from the lengths alone.

    >>> key_range(Causal("top_left"), 2, 5), key_range(Window(left=1), 2, 5)
    ((0, 2), (2, 5))
    >>> key_range(Chunked(4) & Causal(), 1, 10), key_range(~Causal("top_left"), 2, 5)
    ((8, 10), (1, 5))
    """
    low, high = 0, kv_len
    if mask is None:
        return low, high
    first = 0 if mask.align == "top_left" else kv_len - q_len
    for part in mask.parts if isinstance(mask, And) else (mask,):
        least, end = part.range_of_keys(first, first + q_len - 1)
        low = low if least is None else max(low, least)
        high = high if end is None else min(high, end)
    return min(low, kv_len), max(high, 0)


def sees_every_row(mask: Mask | None, q_len: int, kv_len: int) -> bool:
    """Say whether the lengths alone show that every query sees a key.

    >>> sees_every_row(Causal(), 4, 4), sees_every_row(Causal(), 4, 3)
    (True, False)
    """
    if mask is None:
        return kv_len > 0
    offset = 0 if mask.align == "top_left" else kv_len - q_len
    parts = mask.parts if isinstance(mask, And) else (mask,)
    if not all(isinstance(part, _SEE_THEMSELVES) for part in parts):
        return False
    return kv_len > 0 and offset >= 0 and (q_len - 1 + offset < kv_len or _all_causal(parts))


def sees_everything(mask: Mask | None, q_len: int, kv_len: int) -> bool:
    """Say whether the lengths alone show that every query sees a key, and every key is seen.

    >>> sees_everything(Window(left=1), 4, 4), sees_everything(Window(left=1), 2, 5)
    (True, False)
    """
    if mask is None:
        return kv_len > 0
    parts = mask.parts if isinstance(mask, And) else (mask,)
    alike = all(isinstance(part, (Causal, Window)) for part in parts)
    if not alike or not sees_every_row(mask, q_len, kv_len):
        return False
    return key_range(mask, q_len, kv_len) == (0, kv_len)


_SEE_THEMSELVES = (Causal, Window, Chunked, Dilated)


def _all_causal(parts: tuple[Mask, ...]) -> bool:
    return all(isinstance(part, Causal) for part in parts)
