"""Masks: small frozen values that say which keys a query may attend (True = attend).

They join with ``&`` (both allow) and ``|`` (either allows), turn round with ``~``, print a short
deterministic ``repr``, and draw themselves (``#`` = attends, rows = queries, columns = keys):

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

from polyattn.masks.base import And, Full, Index, Mask, Not, Or
from polyattn.masks.explicit import BlockMap, Dense
from polyattn.masks.patterns import Chunked, Dilated, FirstKeys
from polyattn.masks.positional import Causal, PrefixLM, Window
from polyattn.masks.sequences import LeftPadding, Packed, Padding, Segments

LEAVES: tuple[type[Mask], ...] = (
    Full, Causal, Window, Chunked, Dilated, FirstKeys, PrefixLM, BlockMap, Dense, Padding,
    LeftPadding, Packed, Segments,
)  # fmt: skip
"""Every class of masks that is not made of others: a new one joins here."""

OPERATORS: tuple[type[Mask], ...] = (And, Or, Not)
"""The classes of masks that are made of others."""

STATIC_KINDS = frozenset(kind.__name__ for kind in (*(c for c in LEAVES if c.static), *OPERATORS))
"""The kinds of which a mask without arrays consists."""

KINDS_BY_LENGTH = frozenset(kind.__name__ for kind in LEAVES if kind.by_length)
"""The kinds that become simpler, or do not, as one length passes a number."""

ALL_KINDS = frozenset(kind.__name__ for kind in (*LEAVES, *OPERATORS))
"""All that `Mask.kinds` may hold."""

__all__ = [
    "ALL_KINDS",
    "KINDS_BY_LENGTH",
    "LEAVES",
    "OPERATORS",
    "STATIC_KINDS",
    "And",
    "BlockMap",
    "Causal",
    "Chunked",
    "Dense",
    "Dilated",
    "FirstKeys",
    "Full",
    "Index",
    "LeftPadding",
    "Mask",
    "Not",
    "Or",
    "Packed",
    "Padding",
    "PrefixLM",
    "Segments",
    "Window",
]
