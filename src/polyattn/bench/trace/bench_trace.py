"""The command ``polyattn bench trace``: its options, its record, and what it prints.

A part is a module with ``measure(options, say)``, which returns plain data with "goals_met" (None:
not judged) and "rows" (each with a "name"), and with ``table(part)``, which prints it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from polyattn.errors import MissingDependency, PolyattnError

__all__ = ["Options", "add", "run"]

PARTS = {"faults": "polyattn_faults.faults", "overhead": "polyattn.bench.trace.overhead"}
FAULTS = Path(__file__).resolve().parents[4] / "benchmarks" / "faults"
"""Where a checkout has the faults."""

DTYPES = ("float32", "bfloat16")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How much is measured. `dtypes`, `models`: of the faults; `models` empty: all of them."""

    dtypes: tuple[str, ...] = DTYPES
    models: tuple[str, ...] = ()
    quick: bool = False
    seed: int = 0
    verbose: bool = False


def add(kinds: Any) -> None:
    """Add the command to those of ``polyattn bench``."""
    trace = kinds.add_parser(
        "trace",
        help="whether the trace names the bug, and what recording costs",
        description="Bugs seeded into real models: who is named. And a forward's time, recorded.",
    )
    trace.add_argument("--only", choices=list(PARTS), help="one of the parts")
    trace.add_argument("--dtype", choices=DTYPES, help="of the faults; both by default")
    trace.add_argument("--models", metavar="A,B", default="", help="of the faults; all by default")
    trace.add_argument("--quick", action="store_true", help="a small part of each, in a minute")
    trace.add_argument("--seed", type=int, default=0, help="of weights, inputs and choices")
    trace.add_argument("--verbose", action="store_true", help="list every fault, not the misses")
    trace.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="print the record, not the tables; with FILE write it there beside them",
    )
    trace.add_argument(
        "--record",
        action="store_true",
        help="write the record to benchmarks/results/<machine>/trace.json",
    )
    trace.add_argument("--plot", metavar="FILE.png", help="draw the faults (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    """Measure what was asked for, print it, and return 0 if all goals are met, else 1."""
    if options.record and (options.quick or options.only or options.models or options.dtype):
        raise PolyattnError(
            "got --record beside --quick, --only, --models or --dtype, expected a whole run for "
            "the record of the machine; name a file with --json FILE."
        )
    if options.plot and options.only == "overhead":
        raise PolyattnError("got --plot beside --only overhead, expected the faults with it.")
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(
            "got `bench trace` without PyTorch, expected torch: pip install 'polyattn[torch]'"
        )
    from polyattn.bench import records
    from polyattn.bench.report import say

    asked = Options(
        dtypes=(options.dtype,) if options.dtype else DTYPES,
        models=tuple(filter(None, options.models.split(","))),
        quick=options.quick,
        seed=options.seed,
        verbose=options.verbose,
    )
    parts = {name: _part(name) for name in _asked(options)}
    record = _in_force(asked)
    for name, part in parts.items():
        record[name] = part.measure(asked, lambda line: say(line, error=True))
        record["rows"] += record[name].pop("rows")
    record["goals_met"] = all(record[name]["goals_met"] is not False for name in parts)
    if options.json == "-":
        say(records.dump(record), plain=True)
    else:
        for part in parts.values():
            part.table(record)
    _write(record, options)
    return 0 if record["goals_met"] else 1


def _asked(options: argparse.Namespace) -> list[str]:
    return [name for name in PARTS if options.only in (None, name)]


def _part(name: str) -> ModuleType:
    """Import a part; the seeded faults are a bench of this project, and not in its wheel."""
    if name == "faults" and importlib.util.find_spec("polyattn_faults") is None:
        if not (FAULTS / "polyattn_faults").is_dir():
            raise MissingDependency(
                "got `bench trace` from an installed package, expected a checkout of the project, "
                "whose benchmarks/faults holds the faults that are seeded; "
                "`polyattn bench trace --only overhead` runs here."
            )
        sys.path.append(str(FAULTS))
    return importlib.import_module(PARTS[name])


def _in_force(options: Options) -> dict[str, Any]:
    from polyattn.bench import machine
    from polyattn.bench.records import SCHEMA

    return {
        "schema": SCHEMA,
        "kind": "trace",
        "command": machine.command_line("trace"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "flags": machine.flags(),
        "quick": options.quick,
        "seed": options.seed,
        "verbose": options.verbose,
        "rows": [],
    }


def _write(record: dict[str, Any], options: argparse.Namespace) -> None:
    from polyattn.bench import records
    from polyattn.bench.report import say

    aside = options.json == "-"
    paths = [Path(options.json)] if options.json and not aside else []
    paths += [records.default_path(record, "trace")] if options.record else []
    for path in paths:
        records.write(record, path)
        say(f"record: {path}", error=aside)
    if options.plot:
        from polyattn.bench.plot import draw_named

        say(f"plot: {draw_named(record, Path(options.plot))}", error=aside)
