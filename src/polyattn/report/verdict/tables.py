"""The verdict in words and a bounded table, as HTML that needs no script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from polyattn.report.kit.escaping import cut, element
from polyattn.report.verdict.window import ratio, window

if TYPE_CHECKING:
    from polyattn.trace.compare.verdict import Culprit, Row, Verdict

__all__ = ["headline", "summary", "table"]

_ROWS = 200
_LONG = 600
_ITEMS = 100
_KINDS = {True: ("same", "\u2713"), False: ("different", "\u2715"), None: ("unknown", "?")}


def headline(verdict: Verdict) -> str:
    """Return the verdict in one line of plain text."""
    return cut(str(replace(verdict, rows=())).partition("\n")[0], _LONG)


def summary(verdict: Verdict) -> str:
    """Return the verdict's section: what was found and where, what holds, what was compared."""
    kind, mark = _KINDS[verdict.equal]
    parts = [
        f'<section id="verdict" class="{kind}">',
        f'<h1><span class="mark" aria-hidden="true">{mark}</span>{_head(verdict)}</h1>',
        *_reasons(verdict),
        *_facts(_culprit(verdict.culprit) if verdict.culprit else _closest(verdict)),
        '<ul class="guards" aria-label="What was checked first">',
        *_guards(verdict),
        "</ul>",
        *_facts(_compared(verdict), "compared"),
        *_notes(verdict),
        "</section>",
    ]
    return "\n".join(parts)


def _head(verdict: Verdict) -> str:
    """The headline, with the modules that it names set apart."""
    culprit = verdict.culprit
    names = () if culprit is None else (culprit.module, culprit.reference_module, culprit.at)
    rest, parts = headline(verdict), []
    for name in names:
        before, found, after = rest.partition(repr(name)) if name else (rest, "", "")
        if found:
            parts += [element("span", before), _name(name)]
            rest = after
    return "".join([*parts, element("span", rest)])


def _reasons(verdict: Verdict) -> Iterator[str]:
    if verdict.reasons:
        yield '<ul class="reasons">'
        yield from (element("li", cut(one, 2 * _LONG)) for one in verdict.reasons[:_ITEMS])
        yield "</ul>"


def _culprit(culprit: Culprit) -> Iterator[tuple[str, str]]:
    when = [] if culprit.step is None else [f"step {culprit.step}"]
    when += [] if culprit.call is None else [f"call {culprit.call}"]
    tensor = element("code", cut(culprit.tensor or "a tensor", _LONG))
    if culprit.kind == "parameter":
        yield "shows in", f"the weight {tensor}" + (f" ({', '.join(when)})" if when else "")
    else:
        side = "what goes into" if culprit.kind == "input" else "what comes out of"
        when += ["backward"] if culprit.phase.startswith("grad") else []
        said = f" ({', '.join(when)})" if when else ""
        yield "shows in", f"{tensor}, {side} {_name(culprit.at)}{said}"
    if culprit.reference_module not in (None, culprit.module):
        yield "in the reference", _name(culprit.reference_module)
    yield "error", _error(culprit)
    if culprit.evidence:
        yield "evidence", element("span", cut(culprit.evidence, _LONG))
    if culprit.after is not None:
        yield "last that agreed", _name(culprit.after)
    if culprit.between:
        yield "not compared in between", _list(culprit.between)
    if culprit.lacking:
        yield "in the reference only, in between", _list(culprit.lacking)
    if culprit.others:
        yield "differ on their own as well", _list(culprit.others)


def _error(culprit: Culprit) -> str:
    said = f"<strong>{_number(culprit.error)}</strong>, threshold {_number(culprit.threshold)}"
    if 0 < culprit.threshold < float("inf") and culprit.error < float("inf"):
        said += f": {_times(culprit.error / culprit.threshold)} the threshold"
    return said


def _closest(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """How close the comparison came to finding something."""
    known = [(ratio(row) or 0.0, row) for row in verdict.rows if ratio(row) is not None]
    if known:
        worst, row = max(known, key=lambda one: one[0])
        times = f"{_times(worst)} the threshold {_number(row.threshold)}"
        yield "largest error", f"{times}, in {_name(row.module)}"


def _guards(verdict: Verdict) -> Iterator[str]:
    states = {
        True: ("holds", "\u2713", "holds"),
        False: ("fails", "\u2715", "does not hold"),
        None: ("unchecked", "?", "not checked"),
    }
    for guard in verdict.guards.values():
        kind, mark, said = states[guard.holds]
        name = element("b", cut(guard.name, _LONG))
        more = f": {element('span', cut(guard.said, 2 * _LONG))}" if guard.said else ""
        yield (
            f'<li class="{kind}"><span class="mark" aria-hidden="true">{mark}</span>'
            f'{name} <span class="said">{said}{more}</span></li>'
        )


def _compared(verdict: Verdict) -> Iterator[tuple[str, str]]:
    cover = verdict.coverage
    for title, path in (("reference", verdict.reference), ("port", verdict.port)):
        if path:
            yield title, element("code", cut(path, _LONG))
    yield "coverage", element("span", str(cover))
    for names, where in ((cover.only_reference, "reference"), (cover.only_port, "port")):
        if names:
            yield f"only in the {where}", _list(names)


def _notes(verdict: Verdict) -> Iterator[str]:
    if not verdict.notes:
        return
    count = len(verdict.notes)
    yield f'<details class="notes"{" open" if count <= 3 else ""}>'
    yield f"<summary>{count} note{'s' if count > 1 else ''}</summary><ul>"
    yield from (element("li", cut(note, 2 * _LONG)) for note in verdict.notes[:_ITEMS])
    if count > _ITEMS:
        yield f"<li>and {count - _ITEMS} more</li>"
    yield "</ul></details>"


def _facts(found: Iterator[tuple[str, str]], cls: str = "facts") -> Iterator[str]:
    rows = [f"<div><dt>{title}</dt><dd>{said}</dd></div>" for title, said in found]
    if rows:
        yield f'<dl class="{cls}">{"".join(rows)}</dl>'


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(map(_name, names[:_ITEMS]))
    if len(names) > 8:
        more = f" and {len(names) - _ITEMS} more" if len(names) > _ITEMS else ""
        return f"<details><summary>{len(names)} modules</summary>{shown}{more}</details>"
    return shown


def _name(name: str | None) -> str:
    return element("code", cut(name, _LONG)) if name else "the model"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value == 0:
        return "0"
    return {"inf": "\u221e", "nan": "NaN"}.get(f"{value:.1e}", f"{value:.1e}")


def _times(value: float) -> str:
    if value == float("inf"):
        return "\u221e times"
    return f"{value:,.0f} times" if 100 <= value < 1e6 else f"{value:.2g} times"


_COLUMNS = ("module", "step", "call", "in", "out", "added", "threshold", "verdict", "note")


def table(verdict: Verdict) -> str:
    """Return the rows around the culprit as a table, at most 200; for print and without scripts."""
    if not verdict.rows:
        return '<section id="static"><p>No call of any module is in both traces.</p></section>'
    kept = window(verdict.rows, _ROWS)
    head = "".join(f'<th scope="col">{name}</th>' for name in _COLUMNS)
    body = "\n".join(map(_row, verdict.rows[kept.first : kept.stop]))
    said = f"<p>Of the table {kept.said}.</p>" if kept.said else ""
    return (
        f'<section id="static"><h2>Calls in the order in which the port ran</h2>{said}'
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></section>"
    )


def _row(row: Row) -> str:
    name = row.module if row.module is not None else row.reference_module
    cells = [
        "" if row.step is None else str(row.step),
        str(row.call),
        *map(_number, (row.error_in, row.error_out, row.contributed, row.threshold)),
    ]
    numbers = "".join(element("td", one, cls="number") for one in cells)
    backward = " (backward)" if row.phase == "backward" else ""
    kind = "culprit" if row.verdict == "culprit" else ""
    return (
        f'<tr class="{kind}"><td>{_name(cut(name or "", 160))}{backward}</td>{numbers}'
        f"{element('td', row.verdict)}{element('td', cut(row.note, _LONG))}</tr>"
    )
