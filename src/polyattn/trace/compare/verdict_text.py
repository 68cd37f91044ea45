"""A verdict as text: the culprit first, then what qualifies it, then the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyattn.trace.compare.verdict import Culprit, Row, Verdict

__all__ = ["text"]

_SHOWN = 40
_AROUND = 6
_NAMES = 6


def text(verdict: Verdict) -> str:
    """Return the report of a verdict, at most some 80 lines long."""
    lines = [*_head(verdict), ""]
    for guard in verdict.guards.values():
        if guard.holds is False:
            lines.append(f"! {guard.name}: {guard.said}")
    lines += [f"- {note}" for note in verdict.notes[:12]]
    if len(verdict.notes) > 12:
        lines.append(f"- and {len(verdict.notes) - 12} notes more")
    cover = verdict.coverage
    lines.append(f"{cover}.")
    for names, where in ((cover.only_reference, "reference"), (cover.only_port, "port")):
        if names:
            lines.append(f"only in the {where}: {_names(names)}")
    if verdict.rows:
        lines += ["", *_table(verdict.rows)]
    return "\n".join(lines)


def _head(verdict: Verdict) -> Iterator[str]:
    culprit = verdict.culprit
    if culprit is not None:
        yield _culprit(culprit)
        yield from _details(culprit)
    elif verdict.equal:
        yield "same: no module's error is above its threshold"
    else:
        yield "cannot say whether they are the same:"
        yield from (f"  {reason}" for reason in verdict.reasons)


def _culprit(culprit: Culprit) -> str:
    name = _name(culprit.module)
    other = culprit.reference_module
    known = "" if other in (None, culprit.module) else f" (in the reference {_name(other)})"
    if culprit.kind == "parameter":
        return f"different: the weight {culprit.tensor!r} of {name}{known}"
    if culprit.kind == "output":
        return f"different: the output of {name}{known}; its inputs agree"
    return f"different: the code of {name} itself{known}: what it hands to {_name(culprit.at)}"


def _details(culprit: Culprit) -> Iterator[str]:
    when = [] if culprit.step is None else [f"step {culprit.step}"]
    when += [] if culprit.call is None else [f"call {culprit.call}"]
    if culprit.kind != "parameter":
        when.append(f"{culprit.phase}: {culprit.tensor}")
    yield f"  {', '.join(when)}" if when else f"  {culprit.tensor}"
    yield f"  error {_number(culprit.error)}, threshold {_number(culprit.threshold)}" + (
        f" ({culprit.evidence})" if culprit.evidence else ""
    )
    if culprit.after is not None:
        yield f"  after {_name(culprit.after)}, which agrees"
    if culprit.between:
        yield f"  not compared in between: {_names(culprit.between)}"
    if culprit.lacking:
        yield f"  in the reference only, in between: {_names(culprit.lacking)}"
    if culprit.others:
        yield f"  these differ too although their inputs agree: {_names(culprit.others)}"


def _name(name: str | None) -> str:
    return repr(name) if name else "the model"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(name or "the model" for name in names[:_NAMES])
    return shown + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


_COLUMNS = ("module", "step", "call", "in", "out", "added", "threshold", "verdict")


def _table(rows: Sequence[Row]) -> list[str]:
    cells = [_COLUMNS, *_chosen(rows)]
    full = [row for row in cells if len(row) > 1]
    widths = [max(len(row[at]) for row in full) for at in range(len(_COLUMNS))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        if len(row) > 1
        else row[0]
        for row in cells
    ]


def _chosen(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """The culprit and what is around it; runs of the same verdict far from it in one line."""
    centre = next((at for at, row in enumerate(rows) if row.verdict == "culprit"), None)
    if centre is None:
        keep = set(range(len(rows))) if len(rows) <= _SHOWN else set(range(_SHOWN - _AROUND))
        keep |= set(range(len(rows) - _AROUND, len(rows)))
    else:
        keep = {at for at in range(len(rows)) if centre - _AROUND <= at <= centre + _AROUND}
    marked = [at for at, row in enumerate(rows) if row.verdict == "culprit"][:_SHOWN]
    keep |= set(marked)
    skipped: list[Row] = []
    for at, row in enumerate(rows):
        if at not in keep:
            skipped.append(row)
            continue
        yield from _fold(skipped)
        skipped = []
        yield _cells(row)
    yield from _fold(skipped)


def _fold(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    if rows:
        counts: dict[str, int] = {}
        for row in rows:
            counts[row.verdict] = counts.get(row.verdict, 0) + 1
        said = ", ".join(f"{count} {name}" for name, count in counts.items())
        yield (f"... {said}",)


def _cells(row: Row) -> tuple[str, ...]:
    name = row.module if row.module is not None else row.reference_module
    name = name or "(model)"
    if row.phase == "backward":
        name += " (backward)"
    return (
        name if len(name) <= 60 else f"...{name[-57:]}",
        "-" if row.step is None else str(row.step), str(row.call),
        _number(row.error_in), _number(row.error_out), _number(row.contributed),
        _number(row.threshold), row.verdict + (f" ({row.note})" if row.note else ""),
    )  # fmt: skip
