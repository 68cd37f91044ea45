"""The report of a program in a few lines of text that fit a terminal of 80 columns."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator

from polyattn.integrations.program.asked import Record
from polyattn.report.kit.quantities import percent, plural, seconds
from polyattn.report.program.gained import Gained, Range, gained, times_of
from polyattn.report.program.layout import columns, notes, wrapped
from polyattn.report.program.summary import (
    ProblemClass,
    Reason,
    classes,
    cut_short,
    groups,
    reasons,
    short,
)

__all__ = ["headline", "lines", "said_of_gains"]

_MOST_ROWS = 12
_MOST_CLASSES = 8
_MORE = "--json, or --html FILE for a page, has them all"


def lines(record: Record, width: int = 80) -> list[str]:
    """Return the report, each line at most `width` long (40 at least).

    >>> from polyattn.integrations.program.asked import Record
    >>> lines(Record([], []))[0]
    'polyattn: no attention call'
    """
    width = max(width, 40)
    found = [*wrapped(headline(record), width)]
    every = reasons(record)
    if every:
        found += ["", *_ran(record, every, width)]
    else:
        found += wrapped(_nothing(record), width)
    found += _processes(record, width)
    found += _problems(record, width)
    found += _gains(record, width)
    found += _unseen(record, width)
    return found


def headline(record: Record) -> str:
    """Say in a line how much of a program's attention was routed."""
    routed = sum(case.calls for case in record.cases)
    left = record.calls - routed
    busy = {ran.process for case in record.cases for ran in case.ran}
    busy |= {one.process for one in record.passed}
    where = f" in {plural(len(busy), 'process')}" if len(record.processes) > 1 else ""
    if not record.calls:
        return "polyattn: no attention call"
    said = f"polyattn: {plural(record.calls, 'attention call')}{where}"
    if not left:
        return f"{said}, all on its backends"
    return f"{said}, {routed:,} ({percent(routed, record.calls)}) on its backends, {left:,} not"


def _nothing(record: Record) -> str:
    said = "No call of scaled_dot_product_attention came to a result."
    if not record.processes:
        return f"{said} The program imported no torch."
    return (
        f"{said} Attention that is written out by hand, or that torch has traced or compiled into "
        "a program of its own, cannot be seen; a call that raises is not counted."
    )


def _ran(record: Record, every: list[Reason], width: int) -> Iterator[str]:
    """What ran where, a row for each reason, and the reasons below."""
    shown = every[:_MOST_ROWS]
    several = len(record.processes) > 1
    heads = ("calls", "share", "on", *(("where",) if several else ()), "why")
    rows = [heads]
    for number, one in enumerate(shown, 1):
        where = (_where(record, one.processes),) if several else ()
        share = percent(one.calls, record.calls)
        rows.append((f"{one.calls:,}", share, one.backend or "not routed", *where, str(number)))
    yield from columns(rows, width, right="rr")
    if len(every) > len(shown):
        left = sum(one.calls for one in every[_MOST_ROWS:])
        yield f"  and {plural(left, 'call')} for {len(every) - len(shown)} more reasons; {_MORE}"
    yield ""
    yield from notes([f"{one.source}: {one.why}".lstrip(": ") for one in shown], width)


def _where(record: Record, processes: tuple[int, ...]) -> str:
    found = [group for group in groups(record) if set(group.processes) & set(processes)]
    return ", ".join(map(str, found)) if len(found) <= 2 else f"{len(found)} kinds of processes"


def _processes(record: Record, width: int) -> Iterator[str]:
    if len(record.processes) > 1:
        busy = [group for group in groups(record) if group.calls]
        yield ""
        rows = [("processes", "calls", "on")]
        rows += [(str(g), f"{g.calls.total():,}", _shares(g.calls)) for g in busy]
        yield from columns(rows, width, right="lr")
        idle = sum(len(g.processes) for g in groups(record) if not g.calls)
        if idle:
            yield f"  {plural(idle, 'process')} with torch made no call"
    ended = cut_short(record)
    if ended:
        names = ", ".join(one.name for one in ended[:4]) + (", ..." if len(ended) > 4 else "")
        said = (
            f"ended by a signal, a crash or an exec: {plural(len(ended), 'process')} ({names}), "
            "counted up to then"
        )
        yield from wrapped(said, width, first="  ", rest="    ")
    running = [one.name for one in record.processes if one.state == "running"]
    if running:
        said = (
            f"went on after the program: {plural(len(running), 'process')}, counted up to its end"
        )
        yield from wrapped(said, width, first="  ", rest="    ")


def _shares(calls: Counter[str]) -> str:
    total = calls.total()
    if len(calls) == 1:
        return next(iter(calls)) or "not routed"
    return ", ".join(
        f"{name or 'not routed'} {percent(n, total)}" for name, n in calls.most_common()
    )


def _problems(record: Record, width: int) -> Iterator[str]:
    found = classes(record)
    if not found:
        return
    yield ""
    rows = [("calls", "problems, and what they ran on")]
    rows += [(f"{one.calls:,}", _problem(one)) for one in found[:_MOST_CLASSES]]
    yield from columns(rows, width, right="r")
    if len(found) > _MOST_CLASSES:
        left = len(found) - _MOST_CLASSES
        yield from wrapped(f"and {left} more kinds of problems; {_MORE}", width, first="  ")


def _problem(one: ProblemClass) -> str:
    alike = f" (+{len(one.cases) - 1} alike)" if len(one.cases) > 1 else ""
    return f"{short(one.cases[0].problem)}{alike}: {_shares(one.backends)}"


def _gains(record: Record, width: int) -> Iterator[str]:
    if not record.gains:
        return
    yield ""
    yield from wrapped(said_of_gains(gained(record)), width)
    found = _by_time(record)
    if found:
        rows = [("calls", "as it ran", "stock torch", "times", "problem")]
        yield from columns([*rows, *map(_gain, found[:_MOST_CLASSES])], width, right="rrrr")
    if len(found) > _MOST_CLASSES:
        left = len(found) - _MOST_CLASSES
        yield from wrapped(f"and {left} more kinds of problems; {_MORE}", width, first="  ")
    yield from _unmeasured(record, width)
    yield from wrapped(f"measured on {record.machine}", width, first="  ", rest="    ")


def _by_time(record: Record) -> list[ProblemClass]:
    """The measured kinds of problems, those that took the most time first."""
    known = [(one, one.gain.seconds) for one in classes(record) if one.gain and one.gain.seconds]
    known.sort(key=lambda pair: -pair[0].calls * statistics.median(pair[1]))
    return [one for one, _ in known]


def _unmeasured(record: Record, width: int) -> Iterator[str]:
    found: dict[str, list[ProblemClass]] = defaultdict(list)
    for one in classes(record):
        if one.gain is not None and not one.gain.seconds:
            found[one.gain.note].append(one)
    for note, alike in found.items():
        calls = sum(one.calls for one in alike)
        what = short(alike[0].cases[0].problem) if len(alike) == 1 else f"{len(alike)} kinds"
        said = f"{note} ({plural(calls, 'call')}: {what})"
        yield from wrapped(said, width, first="  ", rest="    ")


def said_of_gains(found: Gained) -> str:
    """Say what was gained in all."""
    if found.times is None or found.seconds is None or found.stock_seconds is None:
        return "What was gained could not be measured."
    wrong = f" {found.wrong} of the results were WRONG." if found.wrong else ""
    busy = f"; others took up to {found.foreign:.0%} of the cores" if found.foreign > 0.06 else ""
    return (
        f"Attention took about {_range(found.seconds)}; with stock torch "
        f"{_range(found.stock_seconds)}: {_factor(found.times)}. That is all processes together, "
        f"{percent(found.measured, found.calls)} of the routed calls, forward and backward, made "
        f"again afterwards and checked{busy}.{wrong}"
    )


def _range(value: Range) -> str:
    return f"{seconds(value.about)} ({seconds(value.low)} to {seconds(value.high)})"


def _factor(value: Range) -> str:
    return f"{value.about:.2f} times, {value.low:.2f} to {value.high:.2f}"


def _gain(one: ProblemClass) -> tuple[str, ...]:
    gain = one.gain
    times = None if gain is None else times_of(gain)
    assert gain is not None
    assert times is not None
    return (
        f"{one.calls:,}",
        seconds(statistics.median(gain.seconds)),
        seconds(statistics.median(gain.stock_seconds)),
        f"{times.about:.2f} ({times.low:.2f}-{times.high:.2f})",
        short(one.cases[0].problem),
    )


def _unseen(record: Record, width: int) -> Iterator[str]:
    found: Counter[tuple[str, str]] = Counter()
    for one in record.unseen:
        found[one.what, one.why] += one.times
    if not found:
        return
    yield ""
    yield "out of sight:"
    for (what, why), times in found.most_common(_MOST_ROWS):
        often = f"{times} x " if times > 1 else ""
        yield from wrapped(f"{often}{what}: {why}", width, first="  ", rest="    ")
    if len(found) > _MOST_ROWS:
        yield f"  and {len(found) - _MOST_ROWS} more; {_MORE}"
