"""How a sequence is spread over devices: mesh axes, balance, who computes locally."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BALANCES", "SpreadSequence"]

BALANCES = ("contiguous", "zigzag")
"""Device r holds the r-th part, or an early and a late chunk."""


class SpreadSequence(NamedTuple):
    """A sequence over one mesh axis, or over two: keys travel along the first of them.

    Its text is a fact of a problem, of which backends are made again.

    >>> text = str(SpreadSequence((("sp", 4),), "zigzag"))
    >>> text, SpreadSequence.parse(text).devices
    ('sp=4 zigzag', 4)
    """

    axes: tuple[tuple[str, int], ...]
    balance: str = "contiguous"
    local: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Over how many devices the sequence is spread."""
        count = 1
        for _, size in self.axes:
            count *= size
        return count

    @classmethod
    def parse(cls, text: str) -> SpreadSequence:
        """Read the text again."""
        axes, balance, *local = text.split(" ")
        each = tuple(axis.rsplit("=", 1) for axis in axes.split(","))
        names = tuple(local[0].split(",")) if local else ()
        return cls(tuple((name, int(size)) for name, size in each), balance, names)

    def __str__(self) -> str:
        axes = ",".join(f"{name}={size}" for name, size in self.axes)
        return " ".join(filter(None, (axes, self.balance, ",".join(self.local))))
