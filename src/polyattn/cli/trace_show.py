"""``polyattn trace show``: what is in a trace."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.text import Text

from polyattn.cli.arguments import parser
from polyattn.cli.printing import console, emit_json, table
from polyattn.cli.trace_summary import some_steps
from polyattn.cli.trace_table import print_table, printable, separate
from polyattn.errors import TraceError
from polyattn.trace import Record, Trace, read
from polyattn.trace.format.perturbed import seeds_of

__all__ = ["main"]

SUMMARY = """What is in a trace: what ran, whether it ended, which modules, and the records with
their main statistics. FILE may be a folder or a pattern of several ranks' files."""

_LIMIT = 40
_CLASSES = 12


def main(argv: Sequence[str]) -> int:
    """Show a trace; returns 0."""
    made = parser("trace show", SUMMARY)
    made.add_argument("file", metavar="FILE")
    made.add_argument("--module", metavar="REGEX", help="records of modules with this in the name")
    made.add_argument("--step", metavar="N", type=_step, help="records of this step, or of none")
    made.add_argument(
        "--limit",
        metavar="N",
        type=_count,
        help=f"how many records; 0: all ({_LIMIT}, with --json all)",
    )
    options = made.parse_args(separate(argv))
    wanted = _pattern(options.module)
    trace = read(options.file)
    found = [
        record
        for record in trace.records
        if wanted.search(record.module) and (options.step is None or _in(record, options.step))
    ]
    limit = options.limit if options.limit is not None else 0 if options.json else _LIMIT
    shown = found[:limit] if limit else found
    if options.json:
        emit_json(_plain(trace, found, shown), options.json)
    else:
        _print(trace, found, shown)
    return 0


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number, 0 or more")
    return int(text)


def _step(text: str) -> int | str:
    try:
        return "none" if text.strip().lower() == "none" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a step's number, or none"
        ) from None


def _pattern(text: str | None) -> re.Pattern[str]:
    try:
        return re.compile(text or "")
    except re.error as error:
        raise TraceError(
            f"got --module {text!r}, expected a regular expression ({error})."
        ) from error


def _in(record: Record, step: int | str) -> bool:
    return record.step is None if step == "none" else record.step == step


def _plain(trace: Trace, found: Sequence[Record], shown: Sequence[Record]) -> dict[str, object]:
    return {
        "paths": [str(path) for path in trace.paths],
        "header": trace.header.to_dict(),
        "ended": trace.ended,
        "notes": list(trace.notes),
        "records_in_all": len(trace.records),
        "records_chosen": len(found),
        "records": [record.to_dict() for record in shown],
    }


def _print(trace: Trace, found: Sequence[Record], shown: Sequence[Record]) -> None:
    out = console()
    rows = [
        (name, Text(printable(said)) if isinstance(said, str) else said)
        for name, said in _facts(trace)
    ]
    out.print(table(("", "*"), rows))
    out.print()
    columns = (
        "seq>", "module*", "phase", "tensor", "step>", "call>", "shape", "dtype", "nan>", "inf>",
        "min>", "max>", "mean>", "std>", "l2>",
    )  # fmt: skip
    if shown:
        styles = ["bold red" if any(_bad(record)) else "" for record in shown]
        print_table(out, columns, map(_cells, shown), styles)
    if len(shown) < len(found):
        out.print(f"and {len(found) - len(shown)} records more; --limit 0 shows all", markup=False)
    elif not found:
        why = "it holds no records" if not trace.records else f"none of {len(trace.records)} fits"
        out.print(f"no record to show: {why}", markup=False)


def _facts(trace: Trace) -> Iterator[tuple[str, str | Text]]:
    head = trace.header
    yield "trace", ", ".join(map(str, trace.paths))
    versions = ", ".join(f"{name} {version}" for name, version in head.versions.items())
    yield "framework", f"{head.framework} ({versions})" if versions else head.framework
    moved = seeds_of(trace)
    rest = {
        "recorded": head.created, "command": " ".join(head.argv),
        "seed": "" if head.seed is None else str(head.seed),
        "ranks": f"{len(trace.headers)} of {head.world}" if head.world > 1 else "",
        "weights": ", ".join(f"{count} of {dtype}" for dtype, count in head.dtypes.items()),
        "chosen": ", ".join(f"{k}={v!r}" for k, v in head.selection.items()
                            if v not in (None, False) and v != []
                            and k not in ("stats", "perturb")),
        "perturbed": f"every weight moved by about a rounding (--perturb {moved})" if moved else "",
        "modules": _modules(trace),
        "flags": ", ".join(f"of {name}" for name in head.flags if name in ("torch", "jax")),
    }  # fmt: skip
    yield from ((name, said) for name, said in rest.items() if said)
    steps = some_steps(record.step for record in trace.records)
    yield "records", f"{len(trace.records)} {steps}".rstrip()
    if not trace.ended:
        yield "ended", Text("no: the process was killed, or still runs", style="bold yellow")
    else:
        yield "ended", "yes"
    for name, attributes in (("NaN", ("nan",)), ("infinite", ("pinf", "ninf"))):
        bad = [r for r in trace.records if any(getattr(r, one) for one in attributes)]
        if bad:
            said = f"in {len(bad)} records, first in {printable(_place(bad[0]))}"
            yield name, Text(said, style="bold red")
    for said in trace.notes:
        yield "note", said


def _modules(trace: Trace) -> str:
    """How many were recorded, and of which classes."""
    classes = {record.module: record.cls for record in trace.records}
    of = f" of {len(trace.header.modules)}" if trace.header.modules else ""
    counted = Counter(cls or "unknown" for cls in classes.values()).most_common()
    said = ", ".join(f"{count} {cls}" for cls, count in counted[:_CLASSES])
    more = f" and {len(counted) - _CLASSES} classes more" if len(counted) > _CLASSES else ""
    return f"{len(classes)}{of}{': ' if said else ''}{said}{more}"


def _place(record: Record) -> str:
    name = repr(record.module) if record.module else "the model"
    return f"record {record.seq}: {record.tensor} ({record.phase}) of {name}"


def _bad(record: Record) -> tuple[int | None, int | None]:
    """How many elements are NaN and infinite; None where they were not counted."""
    infinite = None
    if record.pinf is not None and record.ninf is not None:
        infinite = record.pinf + record.ninf
    return record.nan, infinite


def _cells(record: Record) -> tuple[str, ...]:
    return (
        str(record.seq), record.module or "(model)", record.phase, record.tensor,
        "" if record.step is None else str(record.step), str(record.call),
        "x".join(map(str, record.shape)) or "()", record.dtype,
        *("" if count is None else f"{count}!" if count else "0" for count in _bad(record)),
        *(_number(getattr(record, name)) for name in ("min", "max", "mean", "std", "l2")),
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
