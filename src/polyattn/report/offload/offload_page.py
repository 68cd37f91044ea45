"""What came of an offload, to look at: the verdict, the last passes over time, and each unit."""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path

from polyattn.hooks.layerwise_offload import OffloadReport
from polyattn.hooks.layerwise_offload.meter import Event
from polyattn.hooks.layerwise_offload.sizes import said
from polyattn.report.kit.document import beginning, document
from polyattn.report.kit.escaping import element
from polyattn.report.kit.file import write_document

__all__ = ["page", "write_page"]

COMMAND = "offload show"
_LANES = ("copy", "wait", "compute")
_WIDTH, _LANE, _LEFT = 1100.0, 30.0, 70.0
_PASSES = 3
_STYLE = """
svg { width: 100%; height: auto; background: var(--panel); border: 1px solid var(--line);
  border-radius: 8px; }
svg text { fill: var(--soft); font-size: 11px; }
.copy { fill: var(--same); } .wait { fill: var(--culprit); } .compute { fill: var(--unsure); }
table { border-collapse: collapse; margin: 14px 0; background: var(--panel); }
th, td { padding: 3px 12px; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
section { margin: 16px 0; }
"""


def page(report: OffloadReport) -> str:
    """Return the HTML page of a report: one text that needs nothing else.

    >>> from polyattn.hooks.layerwise_offload.offload_report import report_of
    >>> from polyattn.hooks.layerwise_offload import Facts, make_plan
    >>> plan = make_plan(Facts([("a", 1)]), device="cpu", budget=None, tier="disk")
    >>> text = page(report_of(plan, None))
    >>> text.startswith("<!doctype html>"), "nothing streams" in text, "src=" in text
    (True, True, False)
    """
    headline = str(report).splitlines()[0]
    body = [element("h1", headline), _facts(report)]
    if report.units:
        body += [_timeline(report), _units(report)]
    return document(COMMAND, headline, body, style=_STYLE)


def write_page(report: OffloadReport, path: str | Path) -> Path:
    """Write the page of a report to a file, which a browser opens; return its path.

    >>> import tempfile
    >>> from polyattn.hooks.layerwise_offload.offload_report import report_of
    >>> from polyattn.hooks.layerwise_offload import Facts, make_plan
    >>> plan = make_plan(Facts([("a", 1)]), device="cpu", budget=None, tier="disk")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_page(report_of(plan, None), folder + "/page.html").name
    'page.html'
    """
    return write_document(page(report), path, beginning(COMMAND))


def _facts(report: OffloadReport) -> str:
    pairs = [
        ("peak on the device", said(report.peak_bytes)),
        ("peak as planned", said(report.planned_peak_bytes)),
        ("slots", said(report.slot_bytes)),
        ("locked on the host", said(report.locked_bytes)),
        ("slots added, given up", f"{report.slots_added}, {report.slots_given_up}"),
        ("changed weights brought home", said(report.bytes_written_back)),
        ("loads outside any call", str(report.outside)),
    ]  # fmt: skip
    rows = "".join(f"<div>{element('dt', k)}{element('dd', v)}</div>" for k, v in pairs)
    return f'<dl class="facts">{rows}</dl>'


def _timeline(report: OffloadReport) -> str:
    """Draw copies, waits and computations of the last passes, one lane each."""
    passes = sorted((e for e in report.events if e.what == "pass"), key=lambda e: e.begin)
    if not passes:
        return element("p", "No pass was measured by the processor's clock, so none is drawn.")
    begin, end = passes[-_PASSES:][0].begin, passes[-1].end
    scale = (_WIDTH - _LEFT) / max(end - begin, 1e-9)
    names = {row.index: row.name for row in report.units}
    bars = [
        _bar(event, (event.begin - begin) * scale, (event.end - event.begin) * scale, names)
        for event in report.events
        if event.what in _LANES and event.end >= begin and event.begin <= end
    ]
    lanes = [
        f'<text x="6" y="{_LANE * place + 19:.0f}">{name}</text>'
        for place, name in enumerate(_LANES)
    ]
    marks = [
        f'<text x="{_LEFT + (each.begin - begin) * scale:.1f}" y="{3 * _LANE + 16:.0f}">'
        f"{(each.begin - begin) * 1e3:.0f} ms</text>"
        for each in passes[-_PASSES:]
    ]
    drawn = "".join((*lanes, *marks, *bars))
    title = f"the last {min(_PASSES, len(passes))} passes"
    return (
        f"<section>{element('h2', title)}"
        f'<svg viewBox="0 0 {_WIDTH:.0f} {3 * _LANE + 24:.0f}" role="img" '
        f'aria-label="copies, waits and computations over time">{drawn}</svg></section>'
    )


def _bar(event: Event, left: float, width: float, names: dict[int, str]) -> str:
    lane = _LANES.index(event.what)
    name = names.get(event.unit, str(event.unit))
    seconds = f"{event.what} {name}: {(event.end - event.begin) * 1e3:.2f} ms"
    return (
        f'<rect class="{event.what}" x="{_LEFT + max(left, 0.0):.2f}" y="{lane * _LANE + 4:.0f}" '
        f'width="{max(width, 0.4):.2f}" height="{_LANE - 8:.0f}">'
        f"<title>{html.escape(seconds)}</title></rect>"
    )


def _units(report: OffloadReport) -> str:
    heads = ("unit", "size", "from", "uses", "not foreseen", "copy", "wait", "compute", "GB/s")
    rows = []
    for row in report.units:
        fetches, uses = max(row.fetches, 1), max(row.uses, 1)
        times = (row.copy_s / fetches, row.stall_s / uses, row.compute_s / uses)
        rate = "-" if row.rate is None else f"{row.rate / 1e9:.2f}"
        rows.append(_row("td", [
            row.name, said(row.nbytes), row.tier, str(row.uses), str(row.misses),
            *(f"{seconds * 1e3:.2f} ms" for seconds in times), rate,
        ]))  # fmt: skip
    return f"<table>{_row('th', heads)}{''.join(rows)}</table>"


def _row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(element(tag, cell) for cell in cells)}</tr>"
