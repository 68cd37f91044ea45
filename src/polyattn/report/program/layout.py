"""Lines of text for a terminal: columns that fit, notes below them, and nothing cut in a number."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

__all__ = ["columns", "common_tails", "notes", "wrapped"]

_UNITS = "%|x|us|ms|s|B|KiB|MiB|GiB|times|calls?|rounds?|cores?|threads?|keys?|not"
_UNIT = re.compile(rf"(?<=\d) (?=(?:{_UNITS})(?:\W|$))")
_RANGE = re.compile(r"(?<=\d) (-|to) (?=\d)")
_BOUND = "\u00a0"
"""Stands between a number and its unit while lines are broken."""


def wrapped(text: str, width: int, *, first: str = "", rest: str | None = None) -> list[str]:
    """Break a text into lines of at most `width`; only a word longer than a line is cut.

    >>> wrapped("it took 12 ms in all", 11)
    ['it took', '12 ms in', 'all']
    """
    found = textwrap.wrap(
        _RANGE.sub(rf"{_BOUND}\1{_BOUND}", _UNIT.sub(_BOUND, text)),
        width,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_on_hyphens=False,
    )
    return [line.replace(_BOUND, " ") for line in found] or [first.rstrip()]


def columns(rows: Sequence[Sequence[str]], width: int, *, right: str = "") -> Iterator[str]:
    r"""Lay out rows, the first being the heads; the last column takes what is left, and wraps.

    `right`: a letter for each column but the last, ``r`` for numbers.

    >>> print(*columns([("calls", "on"), ("12", "native_cpu")], 40, right="r"), sep="\n")
      calls  on
         12  native_cpu
    """
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [
            cell.rjust(size) if at < len(right) and right[at] == "r" else cell.ljust(size)
            for at, (cell, size) in enumerate(zip(row, widths, strict=False))
        ]
        first = "  " + "".join(f"{cell}  " for cell in cells)
        if len(first) > width - 16 and len(first) > 24:  # too narrow: the last cell goes below
            yield from wrapped(first.strip(), width, first="  ")
            yield from wrapped(row[-1], width, first="      ")
        else:
            lines = wrapped(row[-1], width, first=first, rest=" " * len(first))
            yield from (line.rstrip() for line in lines)


def notes(numbered: Sequence[str], width: int) -> Iterator[str]:
    """Lay out the notes that rows refer to by number; what several end with is said once."""
    tails = common_tails(numbered)
    named = {tail: f"[{chr(97 + at)}]" for at, tail in enumerate(tails)}
    size = len(str(len(numbered)))
    for number, note in enumerate(numbered, 1):
        tail = next((one for one in tails if note.endswith(one)), "")
        said = f"{note.removesuffix(tail).rstrip(', ')} {named[tail]}" if tail else note
        first = f"  {number:>{size}}  "
        yield from wrapped(said, width, first=first, rest=" " * len(first))
    for tail, name in named.items():
        first = f"  {name} "
        yield from wrapped(tail.lstrip(", "), width, first=first, rest=" " * len(first))


def common_tails(texts: Sequence[str], shortest: int = 30) -> list[str]:
    """Return the ends, from a comma on, that several texts share: the longest of each.

    >>> common_tails(["2 x, by `a` on a machine, 2 cores", "3 x, by `a` on a machine, 2 cores"], 9)
    [', by `a` on a machine, 2 cores']
    """
    found: list[str] = []
    for at, text in enumerate(texts):
        if any(text.endswith(tail) for tail in found):
            continue
        for other in texts[at + 1 :]:
            tail = _shared(text, other)
            if len(tail) >= shortest:
                found.append(tail)
                break
    return found


def _shared(one: str, other: str) -> str:
    """The end that two texts share, from a comma before a word on."""
    cuts = [match.start() for match in re.finditer(", (?=[a-z`])", one)]
    return next((one[cut:] for cut in cuts if cut and other.endswith(one[cut:])), "")
