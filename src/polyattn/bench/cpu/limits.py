"""What limits a row, as far as its own figures tell.

What a profile has found beyond that belongs to a kind of machine: ``limits.json`` beside its record
in ``benchmarks/results``, which the tables of ``docs/cpu.md`` show in the place of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["limit"]

_MOSTLY = 0.7


def limit(row: Mapping[str, Any]) -> str:
    """Return what the row's share of the matrix peak, or of the read rate, says of its limit.

    >>> limit({"q_len": 64, "ours_share": 0.8}), limit({"q_len": 1, "ours_share": 0.4})
    ('matrix units', 'work beside the reading')
    """
    share = row["ours_share"]
    if row["q_len"] > 1:
        return "matrix units" if share >= _MOSTLY else "work beside the matrix units"
    if share > 1:
        return "the caches, which hold some of the keys"
    return "read rate" if share >= _MOSTLY else "work beside the reading"
