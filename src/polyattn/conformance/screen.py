"""How a fuzz run looks to people: a progress bar, a table, and the failures below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from polyattn.conformance.cases import Case
from polyattn.conformance.check import Verdict
from polyattn.conformance.report import KINDS, Report

__all__ = ["bar", "show_case", "show_report"]

_SHOWN = 20  # failures in full; --json has all


@contextmanager
def bar(problems: int, console: Console) -> Iterator[Callable[[int, Report], None] | None]:
    """Give a progress callback that draws on a terminal, or None elsewhere."""
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("fuzz"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[found]}"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("fuzz", total=problems, found="")

        def advance(done: int, report: Report) -> None:
            if done % 16 == 0 or done == problems:
                found = f"{len(report.failures)} failures" if report.failures else ""
                progress.update(task, completed=done, found=found)

        yield advance


def show_report(report: Report, console: Console) -> None:
    """Print the counts, then each failure with the line that makes it again."""
    console.print(_table(report))
    for name, why in report.absent.items():
        _line(console, f"{name}: not here: {why}", "dim")
    for name in report.untested:
        _line(console, f"{name}: refused every problem, so nothing is known of it", "yellow")
    for failure in report.failures[:_SHOWN]:
        _line(
            console,
            f"\n{failure.kind.replace('_', ' ')} of {failure.backend}: {failure.detail}",
            "red",
        )
        _line(console, f"  {failure.reproduce}")
    if len(report.failures) > _SHOWN:
        _line(console, f"\n... and {len(report.failures) - _SHOWN} more; --json has them all.")
    wrong, accepted, refused = (report.count(kind) for kind in KINDS)
    stopped = f" of {report.asked} (interrupted)" if report.interrupted else ""
    _line(
        console,
        f"\n{report.problems} problems{stopped} from seed {report.seed} on {report.device} in "
        f"{report.seconds:.1f} s: {wrong} wrong, {accepted} false acceptances, {refused} false "
        "refusals",
        ("green" if report.tested else "yellow") if report.ok else "red",
    )


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("backend")
    heads = ("problems", "right", "wrong", "false acceptances", "refused", "run anyway")
    for head in (*heads, "false refusals"):
        table.add_column(head, justify="right", min_width=max(map(len, head.split())))
    for name, tally in report.tallies.items():
        c = tally.counts
        done = sum(c[x] for x in ("right", "wrong", "false_acceptance", "refused"))
        anyway = sum(row[0] for row in tally.alone.values())
        cells = (done, c["right"], c["wrong"], c["false_acceptance"], c["refused"], anyway)
        table.add_row(name, *map(str, (*cells, c["false_refusal"])))
    return table


def show_case(case: Case, verdicts: Mapping[str, Verdict], console: Console) -> None:
    """Print what each backend made of one case."""
    _line(console, case.spec, "dim")
    for name, verdict in verdicts.items():
        said = {"refused_alone": "refused"}.get(verdict.outcome, verdict.outcome.replace("_", " "))
        detail = f": {verdict.detail}" if verdict.detail else ""
        _line(console, f"{name}: {said}{detail}", "red" if verdict.fails or verdict.able else None)


def _line(console: Console, text: str, style: str | None = None) -> None:
    """Print without wrapping and without reading markup, so that it can be copied."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
