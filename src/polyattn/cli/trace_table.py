"""Tables of names and numbers from trace files, for terminals and for pipes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from polyattn.cli.printing import table

__all__ = ["print_table", "printable", "separate"]

_WIDTH_OF_A_PIPE = 1000


def print_table(
    out: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], styles: Iterable[str]
) -> None:
    """Print rows, each in its style, without the columns that are empty.

    In a terminal names fold; in a pipe each row is one line, so that it can be searched.
    """
    cells = [tuple(map(printable, row)) for row in rows]
    kept = [at for at in range(len(columns)) if any(row[at] for row in cells)]
    heads = [columns[at] if out.is_terminal else columns[at].replace("*", "") for at in kept]
    if not out.is_terminal:
        out.width = _WIDTH_OF_A_PIPE
    styled = [
        tuple(Text(row[at], style=style) for at in kept)
        for row, style in zip(cells, styles, strict=True)
    ]
    out.print(table(heads, styled))


def printable(text: str) -> str:
    r"""Return text from a file as it is safe for a terminal: control characters escaped.

    >>> printable("blocks.0\x1b[2J")
    'blocks.0\\x1b[2J'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def separate(argv: Sequence[str]) -> list[str]:
    """Keep ``--json`` from taking the file after it for the one to write."""
    return ["--json=-" if argument == "--json" else argument for argument in argv]
