"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polyattn.errors import PolyattnError
from polyattn.outputs import PipedConsole
from polyattn.report.kit.quantities import seconds

__all__ = ["console", "emit_json", "note", "seconds", "table"]

_WIDTH_WITHOUT_TERMINAL = 140


def console(*, error: bool = False) -> Console:
    """Return a console; pipes and files get a width that tables fit in. Obeys NO_COLOR."""
    stream = sys.stderr if error else sys.stdout
    width = None
    if not stream.isatty():
        width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns
    return PipedConsole(file=stream, width=width, highlight=False, soft_wrap=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> Table:
    """Make a table; columns whose name ends in ``>`` are numbers, one with ``*`` is wide."""
    made = Table(title=title or None, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        made.add_column(
            column.rstrip(">*"),
            justify="right" if column.endswith(">") else "left",
            ratio=1 if column.endswith("*") else None,
            overflow="fold",
            no_wrap=not column.endswith("*"),
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    made.expand = any(column.endswith("*") for column in columns)
    return made


def note(message: str) -> None:
    """Say something to the person at the terminal, beside the output."""
    print(message, file=sys.stderr)


def emit_json(data: Any, target: str = "-") -> None:
    """Print JSON, or write it to a file."""
    text = json.dumps(data, indent=1, allow_nan=False, default=str) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PolyattnError(
            f"got --json={target}, which cannot be written ({error}); name another file."
        ) from error
