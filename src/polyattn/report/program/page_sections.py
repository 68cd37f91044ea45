"""The sections of the page of a program: tables with bars, each from a record alone."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from polyattn.integrations.program.asked import Gain, Record
from polyattn.report.kit.escaping import cut, element
from polyattn.report.kit.quantities import percent, plural, seconds
from polyattn.report.program.bars import Colours, shares, swatch, times
from polyattn.report.program.gained import gained, times_of
from polyattn.report.program.program_text import said_of_gains
from polyattn.report.program.summary import (
    ProblemClass,
    classes,
    groups,
    process_of,
    reasons,
    short,
)

__all__ = ["gains", "problems", "processes", "ran", "refused", "unseen"]

_LONG = 400
_MOST_ROWS = 500


def ran(record: Record, colours: Colours) -> str:
    """What ran, and why: a bar of all calls, and a row for each reason."""
    found = reasons(record)
    if not found:
        return _section("ran", "What ran", element("p", "No call of attention came to a result."))
    calls: Counter[str] = Counter()
    for one in found:
        calls[one.backend] += one.calls
    legend = "".join(
        _legend(colours.of(name), f"{name or 'not routed'} {percent(count, record.calls)}")
        for name, count in calls.most_common()
    )
    rows = [
        [
            _number(f"{one.calls:,}"),
            _number(percent(one.calls, record.calls)),
            element("td", one.backend or "not routed"),
            element("td", one.source),
            element("td", cut(one.why, _LONG), cls="wide"),
        ]
        for one in found[:_MOST_ROWS]
    ]
    heads = ("calls>", "share>", "ran on", "by", "why")
    bar = shares(dict(calls.most_common()), record.calls, colours)
    return _section(
        "ran", "What ran, and why", f'{bar}<ul class="legend">{legend}</ul>{_table(heads, rows)}'
    )


def processes(record: Record, colours: Colours) -> str:
    """Each process, those with the most calls first."""
    if len(record.processes) < 2:
        return ""
    kinds = ", ".join(f"{group}: {plural(group.calls.total(), 'call')}" for group in groups(record))
    found = [(one, process_of(record, at)) for at, one in enumerate(record.processes)]
    found.sort(key=lambda pair: -pair[1].total())
    most = max(calls.total() for _, calls in found)
    rows = []
    for one, calls in found[:_MOST_ROWS]:
        state = "" if one.state == "ended" else one.state
        rows.append([
            element("td", cut(one.name, _LONG)),
            _number(str(one.pid)),
            _number("" if one.threads is None else str(one.threads)),
            _number(f"{calls.total():,}"),
            f'<td class="bar">{shares(dict(calls.most_common()), most, colours)}</td>',
            element("td", state, cls="state"),
            element("td", _names(calls), cls="wide"),
        ])  # fmt: skip
    heads = ("process", "pid>", "threads>", "calls>", "", "", "ran on")
    return _section("processes", "Processes", f"{element('p', kinds)}{_table(heads, rows)}")


def problems(record: Record, colours: Colours) -> str:
    """Each kind of problem, with a number by which others refer to it."""
    found = classes(record)
    if not found:
        return ""
    heads = ["#>", "calls>", "", "problem", "ran on", *(("times stock>",) if record.gains else ())]
    rows = [
        _problem(number, one, record, colours) for number, one in enumerate(found[:_MOST_ROWS], 1)
    ]
    said = ""
    if len(found) > _MOST_ROWS:
        said = element("p", f"The {_MOST_ROWS} most frequent of {len(found):,}; --json has all.")
    return _section("problems", "Problems", said + _table(heads, rows))


def _problem(number: int, one: ProblemClass, record: Record, colours: Colours) -> list[str]:
    alike = len(one.cases) - 1
    more = element("span", f" (+{alike} alike)") if alike else ""
    backends = one.backends
    cells = [
        _number(str(number), number),
        _number(f"{one.calls:,}", one.calls),
        f'<td class="bar" data-value="{one.calls}">{shares(backends, record.calls, colours)}</td>',
        f'<td class="wide">{element("code", cut(short(one.cases[0].problem), _LONG))}{more}</td>',
        element("td", _names(backends)),
    ]
    if record.gains:
        found = None if one.gain is None else times_of(one.gain)
        cells.append(
            _number("", None) if found is None else _number(f"{found.about:.2f}", found.about)
        )
    return cells


def gains(record: Record) -> str:
    """What was gained: in a sentence, and each measured case with its range."""
    if not record.gains:
        return ""
    known = [gain for gain in record.gains if gain.seconds]
    found = classes(record)
    rows = [_gain(one.calls, one.gain, record) for one in found if one.gain is not None]
    heads = ("calls>", "as it ran>", "stock torch>", "", "times>", "problem")
    key = (
        f'<ul class="legend">{_legend("ours", "as it ran")}{_legend("stock", "stock torch")}'
        "<li>the line: from the fastest to the slowest round</li></ul>"
        if known
        else ""
    )
    said = element("p", said_of_gains(gained(record)))
    return _section("gains", "What was gained", f"{said}{key}{_table(heads, rows[:_MOST_ROWS])}")


def _gain(calls: int, gain: Gain, record: Record) -> list[str]:
    found = times_of(gain)
    problem = element("code", cut(short(record.cases[gain.case].problem), _LONG))
    if found is None:
        note = element("div", cut(gain.note, _LONG), cls="wrong" if "WRONG" in gain.note else "")
        blank = [_number("")] * 2 + ["<td></td>", _number("")]
        return [_number(f"{calls:,}"), *blank, f'<td class="wide">{problem}{note}</td>']
    longest = max((*gain.seconds, *gain.stock_seconds))
    return [
        _number(f"{calls:,}"),
        _number(seconds(statistics.median(gain.seconds))),
        _number(seconds(statistics.median(gain.stock_seconds))),
        f'<td class="bar">{times(gain, longest)}</td>',
        _number(f"{found.about:.2f} ({found.low:.2f} - {found.high:.2f})"),
        f'<td class="wide">{problem}</td>',
    ]


def refused(record: Record) -> str:
    """The backends that could not run a problem, each reason once, with the problems it is of."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    every = classes(record)
    for number, one in enumerate(every, 1):
        for name, why in one.cases[0].refused.items():
            found[name, why].append(number)
    if not found:
        return ""
    rows = [
        [
            element("td", name),
            element("td", cut(why, _LONG), cls="wide"),
            element("td", _numbers(numbers, len(every))),
        ]
        for (name, why), numbers in sorted(found.items(), key=lambda item: -len(item[1]))[
            :_MOST_ROWS
        ]
    ]
    return _section("refused", "Refused", _table(("backend", "why", "problems"), rows))


def _numbers(numbers: Sequence[int], total: int) -> str:
    if len(numbers) == total:
        return "all"
    return cut(", ".join(f"#{number}" for number in numbers), 120)


def unseen(record: Record) -> str:
    """What is known to be out of sight."""
    found: Counter[tuple[str, str]] = Counter()
    for one in record.unseen:
        found[one.what, one.why] += one.times
    if not found:
        return ""
    rows = [
        [
            _number(f"{count:,}"),
            element("td", cut(what, _LONG)),
            element("td", cut(why, _LONG), cls="wide"),
        ]
        for (what, why), count in found.most_common(_MOST_ROWS)
    ]
    return _section("unseen", "Out of sight", _table(("times>", "what", "why"), rows))


def _names(calls: Counter[str]) -> str:
    return ", ".join(name or "not routed" for name, _ in calls.most_common())


def _legend(colour: str, said: str) -> str:
    return f"<li>{swatch(colour)}{element('span', said)}</li>"


def _section(name: str, title: str, inside: str) -> str:
    return f'<section id="{name}">{element("h2", title)}{inside}</section>'


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    top = "".join(
        f'<th scope="col"{" class=number" if head.endswith(">") else ""}>{head.rstrip(">")}</th>'
        for head in heads
    )
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    inside = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{inside}</table></div>'


def _number(text: str, value: float | None = None) -> str:
    data = "" if value is None else f' data-value="{value}"'
    return element("td", text, cls="number").replace("<td", f"<td{data}", 1)
