"""The command ``polyattn bench models``: its options, its record, its exit code."""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import importlib.util
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyattn.bench.models.model_row import Row
from polyattn.errors import MissingDependency, PolyattnError

__all__ = ["LIBRARIES", "add", "run"]

YES, NO, CANNOT_SAY = 0, 1, 2

LIBRARIES = dict.fromkeys(("diffusers", "transformers"), "pip install 'polyattn[bench]'")
"""The libraries whose models can be examined, and how they are got.

``polyattn.bench.models.<library>_models`` has a module ``model_classes`` with ``model_types()``,
which names the models, and a module ``examining`` with ``examine(name)``, which gives a row.
"""


def add(kinds: Any) -> None:
    """Add the command to those of ``polyattn bench``."""
    models = kinds.add_parser(
        "models",
        help="every model of a library on its own attention and on polyattn",
        description="Builds every model of the installed library small, runs it on the library's "
        "own attention and on polyattn, and compares what comes out with a run in float64. Exit "
        "code 1 if a model is different or its process died.",
    )
    models.add_argument("--library", choices=sorted(LIBRARIES), default="transformers")
    models.add_argument(
        "--only",
        metavar="PATTERN",
        default="",
        help="models whose name has this regular expression",
    )
    models.add_argument("--jobs", type=int, default=1, help="processes at once (1)")
    models.add_argument("--limit", type=float, default=300.0, help="seconds for one model (300)")
    models.add_argument(
        "--memory", type=int, default=0, metavar="MIB", help="memory of one process (no limit)"
    )
    models.add_argument("--all", action="store_true", help="list the equal ones, too")
    models.add_argument("--json", action="store_true", help="print the record, not the table")
    models.add_argument(
        "--record",
        metavar="FILE",
        nargs="?",
        const="",
        help="write the record; without FILE to benchmarks/results/<machine>/models-<library>.json",
    )


def run(options: argparse.Namespace) -> int:
    """Examine, print, and return 0 for no difference, 1 for one, 2 if it cannot be said."""
    if options.jobs < 1 or options.limit <= 0 or options.memory < 0:
        raise PolyattnError(
            f"got --jobs {options.jobs} --limit {options.limit} --memory {options.memory}, "
            "expected a job or more, some seconds, and no negative memory."
        )
    if options.record == "" and options.only:
        raise PolyattnError(
            "got --record without FILE beside --only, expected a whole run for the record of the "
            "machine; name a FILE."
        )
    library = options.library
    if importlib.util.find_spec(library) is None or importlib.util.find_spec("torch") is None:
        raise MissingDependency(
            f"got `bench models` without {library}, expected it and torch: {LIBRARIES[library]}"
        )
    from polyattn.bench import records
    from polyattn.bench.models.models_table import print_record
    from polyattn.bench.report import say

    record = measure(
        library, options.only, jobs=options.jobs, limit_s=options.limit,
        memory_mib=options.memory, progress=_bar if not options.json else _silent,
    )  # fmt: skip
    if options.json:
        say(records.dump(record), plain=True)
    else:
        print_record(record, options.all)
    if options.record is not None:
        path = Path(options.record or records.default_path(record, f"models-{library}"))
        records.write(record, path)
        say(f"record: {path}", error=options.json)
    counts = record["counts"]
    if counts.get("different") or counts.get("crashed"):
        return NO
    return YES if counts.get("equal") else CANNOT_SAY


Progress = Callable[[list[str], Callable[[Callable[[Row], None]], None]], None]


def measure(
    library: str,
    only: str = "",
    *,
    jobs: int = 1,
    limit_s: float = 300.0,
    memory_mib: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Examine the models whose names match and return the record.

    Raises PolyattnError for a pattern that is none, or that no name matches.
    """
    from polyattn.bench import machine, records
    from polyattn.bench.models.processes import Examiners

    names = _names(library, only)
    rows: list[Row] = []
    begin = time.monotonic()
    module = f"polyattn.bench.models.{library}_models.examining"
    examiners = Examiners(module, jobs=jobs, limit_s=limit_s, memory_mib=memory_mib)

    def examine(heard: Callable[[Row], None]) -> None:
        def both(row: Row) -> None:
            rows.append(row)
            heard(row)

        examiners.run(names, both)

    (progress or _silent)(names, examine)
    rows.sort(key=lambda row: row.name)
    return {
        "schema": records.SCHEMA,
        "kind": "models",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": machine.command_line("polyattn bench models"),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "library": library,
        "version": importlib.metadata.version(library),
        "only": only,
        "took_s": round(time.monotonic() - begin),
        "counts": dict(Counter(row.outcome for row in rows)),
        "calls": sum(row.calls for row in rows),
        "rows": [row.to_json() for row in rows],
    }


def _names(library: str, only: str) -> list[str]:
    try:
        wanted = re.compile(only)
    except re.error as error:
        raise PolyattnError(
            f"got --only {only!r}, expected a regular expression: {error}."
        ) from None
    listed = importlib.import_module(f"polyattn.bench.models.{library}_models.model_classes")
    known: list[str] = listed.model_types()
    names = [name for name in known if wanted.search(name)]
    if not names:
        raise PolyattnError(
            f"got --only {only!r}, which is in no name of the {len(known)} models of {library}."
        )
    return names


def _silent(names: list[str], examine: Callable[[Callable[[Row], None]], None]) -> None:
    examine(lambda row: None)


def _bar(names: list[str], examine: Callable[[Callable[[Row], None]], None]) -> None:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from polyattn.bench.report import console

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=console(error=True), transient=True) as bar:
        task = bar.add_task("models", total=len(names), now="")

        def heard(row: Row) -> None:
            bar.update(task, advance=1, now=f"{row.name}: {row.outcome}")
            if row.outcome in ("different", "crashed"):
                bar.console.print(f"{row.name}: {row.outcome}: {row.reason}", markup=False)

        examine(heard)
