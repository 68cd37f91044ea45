"""One run of ``bench generate``: every row, as a record."""

from __future__ import annotations

import datetime
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyattn.bench import machine
from polyattn.bench.generate.figures import figures
from polyattn.bench.generate.generated import Row
from polyattn.bench.generate.sides import SideFailed, Sides
from polyattn.bench.generate.worker import SIDES, Job
from polyattn.bench.records import SCHEMA
from polyattn.errors import MissingDependency

__all__ = ["Options", "measure", "require"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How much is measured. `tokens`: that are timed; `known`: lengths of keys seen before.

    `threads`: of torch; 0: as many as it takes by itself. `sizes`: of the models, for tests.
    """

    rows: tuple[Row, ...]
    tokens: int = 200
    block: int = 5
    seed: int = 0
    known: bool = False
    threads: int = 0
    quick: bool = False
    sizes: Any = None


def require() -> None:
    """Raise MissingDependency where it cannot run."""
    for name, extra in (("torch", "torch"), ("transformers", "bench")):
        if importlib.util.find_spec(name) is None:
            raise MissingDependency(
                f"got `bench generate` without {name}, expected it: pip install 'polyattn[{extra}]'"
            )


def measure(options: Options, say: Say = lambda line: None) -> dict[str, Any]:
    """Generate every row on all sides and return the record; `say` hears what is being done.

    Ctrl-C ends it with the rows that were measured, and "interrupted".
    """
    require()
    rows: list[dict[str, Any]] = []
    interrupted = False
    try:
        while len(rows) < len(options.rows):
            _measure_until_failure(options, rows, say)
    except KeyboardInterrupt:
        interrupted = True
    return {
        **_in_force(options),
        "goals_met": _verdict(rows),
        "interrupted": interrupted,
        "rows": rows,
    }


def _measure_until_failure(options: Options, rows: list[dict[str, Any]], say: Say) -> None:
    """Add the rows that are missing; one that fails is added, and ends it: the processes, too."""
    begin = time.perf_counter()
    with Sides(_sides(options.rows)) as sides:
        for row in options.rows[len(rows) :]:
            took = f"{time.perf_counter() - begin:.0f} s"
            say(f"{len(rows) + 1}/{len(options.rows)} {row.name} (after {took})")
            try:
                rows.append(_measured(row, sides, options))
            except SideFailed as error:
                rows.append(_failed(row, error))
                say(f"{row.name}: {error}")
                return


def _sides(rows: tuple[Row, ...]) -> tuple[str, ...]:
    return SIDES if any(row.as_run for row in rows) else SIDES[:-1]


def _measured(row: Row, sides: Sides, options: Options) -> dict[str, Any]:
    names = SIDES if row.as_run else SIDES[:-1]
    # the prefill gives the first token, and a block more is for looking
    tokens = 1 + options.block + options.tokens
    job = Job(
        row, tokens, options.block, options.seed, options.known, options.threads, options.sizes
    )
    return figures(row, sides.generate(job, names))


def _failed(row: Row, error: SideFailed) -> dict[str, Any]:
    """Return a row without figures: a goal missed if polyattn fails where stock does not."""
    ours = error.side in ("polyattn", "run")
    failed = {"side": error.side, "why": error.why}
    return {"name": row.name, "goal": row.goal, "failed": failed, "met": False if ours else None}


def _verdict(rows: list[dict[str, Any]]) -> bool | None:
    """Say whether all goals are met: no if one is missed, None if one cannot be judged."""
    met = [row["met"] for row in rows]
    return False if False in met else None if None in met else True


def _in_force(options: Options) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kind": "generate",
        "command": machine.command_line("generate"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "flags": machine.flags(),
        "tokens": options.tokens,
        "block": options.block,
        "seed": options.seed,
        "lengths": "known" if options.known else "fresh",
        "quick": options.quick,
    }
