"""Masks: small frozen values that say which keys a query may attend (True = attend).

They join with ``&`` (both allow) and ``|`` (either allows), print a short deterministic
``repr``, and draw themselves (``#`` = attends, rows = queries, columns = keys):

>>> print((Causal() & Window(left=1)).picture())
#...
##..
.##.
..##

The definition of each mask is its ``allows``: plain operators on index arrays, so that one
line of code serves float64 references, FlexAttention's ``mask_mod`` and every array library.

Letters: `B` batch, `T` query length, `S` key length, `N` query heads.
"""

from __future__ import annotations

from polyattn.masks.base import And, Full, Index, Mask, Or
from polyattn.masks.explicit import BlockMap, Dense
from polyattn.masks.positional import Causal, PrefixLM, Window
from polyattn.masks.sequences import Packed, Padding, Segments

LEAVES: tuple[type[Mask], ...] = (
    Full, Causal, Window, PrefixLM, BlockMap, Dense, Padding, Packed, Segments,
)  # fmt: skip
"""Every class of masks that joins no others: a new one joins here."""

STATIC_KINDS = frozenset(kind.__name__ for kind in (*(c for c in LEAVES if c.static), And, Or))
"""The kinds of which a mask without arrays consists."""

ALL_KINDS = frozenset(kind.__name__ for kind in (*LEAVES, And, Or))
"""All that `Mask.kinds` may hold."""

__all__ = [
    "ALL_KINDS",
    "LEAVES",
    "STATIC_KINDS",
    "And",
    "BlockMap",
    "Causal",
    "Dense",
    "Full",
    "Index",
    "Mask",
    "Or",
    "Packed",
    "Padding",
    "PrefixLM",
    "Segments",
    "Window",
]
