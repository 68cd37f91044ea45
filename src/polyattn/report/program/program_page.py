"""The page of a program's attention, and its file: one text that needs nothing but a browser."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from polyattn.integrations.program.asked import Record
from polyattn.report.kit.document import asset, beginning, document
from polyattn.report.kit.escaping import cut, element
from polyattn.report.kit.file import refuse_others, write_document
from polyattn.report.program.bars import Colours
from polyattn.report.program.page_sections import gains, problems, processes, ran, refused, unseen
from polyattn.report.program.program_text import headline
from polyattn.report.program.summary import reasons

__all__ = ["check_page", "page", "write_page"]

COMMAND = "run"
_LONG = 600


def page(record: Record) -> str:
    """Return the HTML page of a record.

    >>> from polyattn.integrations.program.asked import Passed, Record
    >>> text = page(Record([], [Passed("a tensor of type <b>", "(2, 3)", 4)], ("train.py",)))
    >>> text.startswith("<!doctype html>"), "type &lt;b&gt;" in text, "src=" in text
    (True, True, False)
    """
    said = headline(record).removeprefix("polyattn: ")
    backends: Counter[str] = Counter()
    for one in reasons(record):
        backends[one.backend] += one.calls
    colours = Colours([name for name, _ in backends.most_common()])
    body = [
        f'<div id="verdict" class="{_state(record)}">{element("h1", said)}{_facts(record)}</div>',
        ran(record, colours),
        gains(record),
        processes(record, colours),
        problems(record, colours),
        refused(record),
        unseen(record),
    ]
    return document(
        COMMAND, said, filter(None, body), style=_asset("program.css"), script=_asset("program.js"),
        data="{}",
    )  # fmt: skip


def write_page(record: Record, path: str | Path) -> Path:
    """Write the page of a record to a file, which a browser opens; return its path.

    The file is replaced if it is such a page, and refused (TraceError) if it is anything else.

    >>> import tempfile
    >>> from polyattn.integrations.program.asked import Record
    >>> write_page(Record([], []), Path(tempfile.mkdtemp()) / "report.html").name
    'report.html'
    """
    return write_document(page(record), path, beginning(COMMAND))


def check_page(path: str | Path) -> None:
    """Raise TraceError if a page may not be written over what is at `path`."""
    refuse_others(path, beginning(COMMAND))


def _state(record: Record) -> str:
    routed = sum(case.calls for case in record.cases)
    return "same" if routed and routed == record.calls else "unknown"


def _facts(record: Record) -> str:
    rows = (f"<div>{element('dt', k)}<dd>{v}</dd></div>" for k, v in _known(record))
    return f'<dl class="facts">{"".join(rows)}</dl>'


def _known(record: Record) -> Iterator[tuple[str, str]]:
    if record.program:
        yield "program", element("code", cut(" ".join(record.program), _LONG))
    versions = {f"{ran.backend} {ran.version}" for case in record.cases for ran in case.ran}
    if versions:
        yield "backends", element("span", ", ".join(sorted(versions)))
    if record.processes:
        yield "processes", element("span", f"{len(record.processes):,} with torch")
    if record.machine:
        yield "measured on", element("span", cut(record.machine, _LONG))


def _asset(name: str) -> str:
    return asset("polyattn.report.program", "assets", name)
