"""The page of a verdict, and its file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from polyattn.errors import TraceError
from polyattn.report.kit.document import asset, beginning, document
from polyattn.report.kit.escaping import element
from polyattn.report.kit.file import write_document
from polyattn.report.verdict.columns import columns
from polyattn.report.verdict.tables import headline, summary, table

if TYPE_CHECKING:
    from polyattn.trace.compare.verdict import Verdict

__all__ = ["page", "write_page"]

COMMAND = "trace diff"
_SCRIPTS = (
    "model", "events", "state", "scroll", "paint", "tree", "curve", "pointer", "steps", "table",
    "details", "main",
)  # fmt: skip


def page(verdict: Verdict, *, rows: int = 20_000) -> str:
    """Return the HTML page of a comparison's verdict: one text that needs nothing else.

    Of more than `rows` rows, those around the culprit are in it, and it says what was left out.
    Raises TraceError if `rows` is below 1.

    >>> from polyattn.trace.compare import Culprit, Row, Verdict
    >>> culprit = Culprit(module="up", reference_module="up", kind="output", tensor="out")
    >>> row = Row(module="up", reference_module="up", error_out=0.5, verdict="culprit")
    >>> text = page(Verdict(equal=False, culprit=culprit, rows=(row,)))
    >>> text.startswith("<!doctype html>"), "the output of " in text, "src=" in text
    (True, True, False)
    """
    if rows < 1:
        raise TraceError(f"got rows={rows}, expected how many rows the page may hold, from 1.")
    data, kept = columns(verdict, rows)
    left = element("p", f"Of the calls, {kept.said}.", cls="left-out") if kept.said else ""
    explorer = _asset("explorer.html") if verdict.rows else ""
    return document(
        COMMAND,
        headline(verdict),
        [summary(verdict), f"{left}{explorer}", table(verdict)],
        style=_asset("explorer.css"),
        script=_script() if verdict.rows else "",
        data=data,
    )


def write_page(verdict: Verdict, path: str | Path, *, rows: int = 20_000) -> Path:
    """Write the page of a verdict to a file, which a browser opens; return its path.

    The file is replaced if it is such a page, and refused if it is anything else, as one of the
    traces. `rows` as in :func:`page`. Raises TraceError if it is refused or cannot be written; what
    was there before is then as it was.

    >>> import tempfile
    >>> from polyattn.trace.compare import Verdict
    >>> path = write_page(Verdict(equal=True), Path(tempfile.mkdtemp()) / "diff.html")
    >>> "same" in path.read_text(encoding="utf-8")
    True
    """
    return write_document(page(verdict, rows=rows), path, beginning(COMMAND))


def _asset(name: str) -> str:
    return asset("polyattn.report.verdict", "assets", name)


@cache
def _script() -> str:
    parts = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    return f'"use strict";\ntry {{ (() => {{\n{parts}\n}})(); }}\n{_asset("failed.js")}'
