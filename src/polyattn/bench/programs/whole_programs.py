"""One run of ``bench programs``: every row, as a record."""

from __future__ import annotations

import datetime
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from polyattn.bench import machine
from polyattn.bench.programs.program_rows import ProgramRow
from polyattn.bench.records import SCHEMA
from polyattn.errors import MissingDependency

__all__ = ["Options", "measure"]


@dataclass(frozen=True)
class Options:
    """How much is measured. `sizes`: of each program, for tests."""

    rows: tuple[ProgramRow, ...]
    rounds: int = 7
    seed: int = 0
    quick: bool = False
    sizes: dict[str, Any] = field(default_factory=dict)


def require() -> None:
    """Raise MissingDependency where nothing can run; a library less is said in its rows."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(
            "got `bench programs` without PyTorch, expected torch: pip install 'polyattn[torch]'"
        )


def measure(options: Options, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure every row and return the record; `say` hears what is being done.

    Ctrl-C ends it with the rows that were measured, and "interrupted".
    """
    require()
    from polyattn.bench.programs.program_run import run_row

    rows: list[dict[str, Any]] = []
    interrupted = False
    begin = time.perf_counter()
    try:
        for row in options.rows:
            took = f"{time.perf_counter() - begin:.0f} s"
            say(f"{len(rows) + 1}/{len(options.rows)} {row.name} (after {took})")
            rows.append(run_row(row, options.rounds, options.seed, options.sizes.get(row.program)))
    except KeyboardInterrupt:
        interrupted = True
    met = [row["met"] for row in rows]
    return {
        "schema": SCHEMA, "kind": "programs", "command": machine.command_line("programs"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(), "versions": machine.versions(), "flags": machine.flags(),
        "rounds": options.rounds, "seed": options.seed, "quick": options.quick,
        "goals_met": False if False in met else None if None in met else True,
        "interrupted": interrupted, "rows": rows,
    }  # fmt: skip
