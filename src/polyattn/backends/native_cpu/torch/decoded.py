"""A mask's program read back as a dense mask, in plain operations of torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyattn.masks import Full, Index, LeftPadding, Packed, Padding, Segments
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
    WIDTH,
)
from polyattn.torch.kit.masking import Dims, grid

__all__ = ["allowed_by"]


def allowed_by(
    codes: Sequence[int], arrays: Sequence[Tensor], dims: Dims, device: torch.device
) -> Tensor:
    """Return which keys a query may attend, (B|1, N|1, T|1, S|1) bool.

    `codes`, `arrays`: see `polyattn.native.program`. Packed rows are one batch entry.
    """
    terms = [codes[at : at + WIDTH] for at in range(0, len(codes), WIDTH)]
    packed = [term for term in terms if term[0] == PACKED]
    within = Packed(arrays[packed[0][1]], arrays[packed[0][2]]) if packed else Full()
    ix = grid(within, dims, device)
    stack: list[Tensor] = []
    if packed:
        stack.append(within.allows(ix))
    for kind, a, b, c in terms:
        if kind == PACKED:
            continue
        if kind in (BOTH, EITHER):
            other, one = stack.pop(), stack.pop()
            stack.append(one & other if kind == BOTH else one | other)
        elif kind == COMPLEMENT:
            stack.append(~stack.pop())
        else:
            stack.append(_term(kind, a, b, c, arrays, ix))
    found = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    for part in stack:  # the packed sequences, and what the other terms came to
        found = found & part
    return found


def _term(kind: int, a: int, b: int, c: int, arrays: Sequence[Tensor], ix: Index) -> Tensor:
    if kind == BAND:
        ahead = ix.j - ix.t - (ix.kv_len - ix.q_len if c else 0)
        return (ahead >= a) & (ahead <= b)  # type: ignore[no-any-return]
    if kind in (CHUNK, STEP):
        own = ix.t + (ix.kv_len - ix.q_len if b else 0)
        return ix.j // a == own // a if kind == CHUNK else (ix.j - own) % a == 0
    if kind == FIRST_KEYS:
        return ix.j < a  # type: ignore[no-any-return]
    if kind == DENSE:
        return arrays[a] != 0
    if kind == BLOCKS:
        bits = arrays[a]
        batch, head = (i * (size > 1) for i, size in zip((ix.b, ix.n), bits.shape, strict=False))
        return bits[batch, head, ix.t // b, ix.j // c] != 0
    masks = {
        EVERYTHING: lambda: Full(),
        KV_LIMIT: lambda: Padding(None, arrays[a]),
        Q_LIMIT: lambda: Padding(arrays[a], None),
        KV_START: lambda: LeftPadding(None, arrays[a]),
        Q_START: lambda: LeftPadding(arrays[a], None),
        SEGMENTS: lambda: Segments(arrays[a], arrays[b]),
    }
    return masks[kind]().allows(ix)  # type: ignore[no-any-return]
