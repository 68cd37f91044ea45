"""A mask's program read back: what it allows, in operations that any library's arrays have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyattn.masks import Full, Index, LeftPadding, Mask, Packed, Padding, Segments
from polyattn.native.program import (
    BAND,
    BLOCKS,
    BOTH,
    CHUNK,
    COMPLEMENT,
    DENSE,
    EITHER,
    EVERYTHING,
    FIRST_KEYS,
    KV_LIMIT,
    KV_START,
    PACKED,
    Q_LIMIT,
    Q_START,
    SEGMENTS,
    STEP,
    UNBOUNDED,
    WIDTH,
)

__all__ = ["allowed_at", "sequences_of"]


def sequences_of(codes: Sequence[int], arrays: Sequence[Any]) -> Mask:
    """Return where the packed sequences lie, `Full` where nothing is packed.

    Coordinates are made of it. `codes`, `arrays`: see `polyattn.native.program`.
    """
    packed = [term for term in _terms(codes) if term[0] == PACKED]
    return Packed(arrays[packed[0][1]], arrays[packed[0][2]]) if packed else Full()


def allowed_at(codes: Sequence[int], arrays: Sequence[Any], index: Index) -> Any:
    """Return which keys a query may attend, (B|1, N|1, T|1, S|1) bool; None: all of them.

    `index`: coordinates of the sequences. Packed rows are one batch entry.
    """
    stack: list[Any] = []
    for kind, a, b, c in _terms(codes):
        if kind == PACKED:
            stack.append(sequences_of(codes, arrays).allows(index))
        elif kind in (BOTH, EITHER):
            other, one = stack.pop(), stack.pop()
            stack.append(one & other if kind == BOTH else one | other)
        elif kind == COMPLEMENT:
            stack.append(~stack.pop())
        else:
            stack.append(_term(kind, a, b, c, arrays, index))
    found = None
    for part in stack:  # the packed sequences, and what the other terms came to
        found = part if found is None else found & part
    return found


def _terms(codes: Sequence[int]) -> list[Sequence[int]]:
    return [codes[at : at + WIDTH] for at in range(0, len(codes), WIDTH)]


def _term(kind: int, a: int, b: int, c: int, arrays: Sequence[Any], ix: Index) -> Any:
    if kind == BAND:
        ahead = ix.j - ix.t - (ix.kv_len - ix.q_len if c else 0)
        if b >= UNBOUNDED:  # which integers of 32 bits cannot be compared with
            return ahead >= a if a > -UNBOUNDED else Full().allows(ix)
        return ahead <= b if a <= -UNBOUNDED else (ahead >= a) & (ahead <= b)
    if kind in (CHUNK, STEP):
        own = ix.t + (ix.kv_len - ix.q_len if b else 0)
        return ix.j // a == own // a if kind == CHUNK else (ix.j - own) % a == 0
    if kind == FIRST_KEYS:
        return ix.j < a
    if kind == DENSE:
        return arrays[a] != 0
    if kind == BLOCKS:
        bits = arrays[a]
        batch, head = (i * (size > 1) for i, size in zip((ix.b, ix.n), bits.shape, strict=False))
        return bits[batch, head, ix.t // b, ix.j // c] != 0
    masks: dict[int, Callable[[], Mask]] = {
        EVERYTHING: lambda: Full(),
        KV_LIMIT: lambda: Padding(None, arrays[a]),
        Q_LIMIT: lambda: Padding(arrays[a], None),
        KV_START: lambda: LeftPadding(None, arrays[a]),
        Q_START: lambda: LeftPadding(arrays[a], None),
        SEGMENTS: lambda: Segments(arrays[a], arrays[b]),
    }
    return masks[kind]().allows(ix)
