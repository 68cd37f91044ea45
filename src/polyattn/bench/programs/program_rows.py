"""Which programs are timed, on which sides, and by how much polyattn has to be ahead."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

from polyattn.errors import PolyattnError

__all__ = ["LEAST", "OURS", "ROWS", "ProgramRow", "chosen"]

OURS = "polyattn"
LEAST = 0.97
"""What the stock default's time over ours has to be at least, whatever the program."""
_TYPES = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class ProgramRow:
    """A program in one dtype.

    `stock`: the side that the library takes by itself; `others`: what else it offers. `goal`: least
    time of stock over ours; `goal_best`: of the quickest side that is not ours.
    """

    program: str
    dtype: str
    stock: str = "sdpa"
    others: tuple[str, ...] = ()
    goal: float = LEAST
    goal_best: float | None = None

    @property
    def name(self) -> str:
        """Return the row's name, which ``--only`` looks at."""
        return f"{self.program} {_TYPES[self.dtype]}"

    @property
    def sides(self) -> tuple[str, ...]:
        """Return every side, stock first and ours last."""
        return (self.stock, *self.others, OURS)


def _all() -> Iterator[ProgramRow]:
    for dtype in _TYPES:
        yield ProgramRow("llama prefill 2k", dtype)
        yield ProgramRow(
            "gemma-2 prefill 4k", dtype, "eager", ("flex_attention",), goal=3.0, goal_best=1.3
        )
        yield ProgramRow(
            "gpt-oss prefill 2k", dtype, "eager", ("flex_attention",), goal=3.0, goal_best=1.3
        )
        yield ProgramRow("mistral window prefill 4k", dtype, goal=1.5)
        yield ProgramRow("bert padded batch", dtype, goal=1.2)
        yield ProgramRow("vit batch", dtype)
        yield ProgramRow("flux transformer", dtype, "native")
        yield ProgramRow("wan transformer", dtype, "native")
        yield ProgramRow("nanogpt training step", dtype, "torch")
        yield ProgramRow("llama generate 1k + 200", dtype)


ROWS = tuple(_all())


def chosen(only: str) -> tuple[ProgramRow, ...]:
    """Return the rows whose name holds the pattern, or matches its wildcards.

    >>> [row.name for row in chosen("vit")]
    ['vit batch fp32', 'vit batch bf16']
    """
    found = tuple(r for r in ROWS if only in r.name or fnmatch.fnmatch(r.name, only))
    if not found:
        names = "; ".join(row.name for row in ROWS)
        raise PolyattnError(f"got --only {only!r}, expected a part of one of: {names}.")
    return found
