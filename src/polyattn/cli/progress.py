"""A bar for what takes its time, on stderr and only where somebody looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from polyattn.cli.printing import console

if TYPE_CHECKING:
    from polyattn.measure.tune import Progress

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """Show a bar on stderr while the block lasts; yields what reports progress."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(what), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(), TextColumn("{task.description}"),
    )  # fmt: skip
    out = console(error=True)
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def report(done: int, total: int, doing: str) -> None:
            bar.update(task, completed=done, total=total, description=doing[:80])

        yield report
