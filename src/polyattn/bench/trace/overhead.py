"""The part ``overhead`` of ``polyattn bench trace``: what recording costs a forward on the CPU."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polyattn.bench.trace.allocator import keep_memory
from polyattn.bench.trace.overhead_models import MODELS, Timed, make
from polyattn.bench.trace.overhead_peers import CASES, Case
from polyattn.bench.trace.overhead_timing import Rounds, summary, time_cases
from polyattn.trace import read

if TYPE_CHECKING:
    from polyattn.bench.trace.bench_trace import Options

__all__ = ["GOAL_BYTES", "measure", "table"]

GOAL_BYTES = 1024
ROUNDS, BLOCK_S = 7, 0.25
QUICK_ROUNDS, QUICK_BLOCK_S = 5, 0.2


def measure(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Time every case around every model; `quick` is the reference model, a few rounds.

    The process's allocator keeps memory from then on: see :mod:`polyattn.bench.trace.allocator`.
    Returns the part's record. Raises MissingDependency without transformers.
    """
    rounds, block_s = (QUICK_ROUNDS, QUICK_BLOCK_S) if options.quick else (ROUNDS, BLOCK_S)
    allocator = keep_memory()
    rows: list[dict[str, Any]] = []
    models: list[dict[str, Any]] = []
    for timed in MODELS[:1] if options.quick else MODELS:
        say(f"timing {timed.name}: {timed.what}")
        of_model, of_cases = _of_model(timed, options.seed, rounds, block_s)
        models.append(of_model)
        rows += of_cases
    judged = [row["met"] for row in (*rows, *models) if row["met"] is not None]
    return {
        "goals_met": all(judged),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "block_s": block_s,
        "allocator": allocator,
        "models": models,
        "rows": rows,
    }


def _of_model(
    timed: Timed, seed: int, rounds: int, block_s: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    model, inputs = make(timed, seed)
    with tempfile.TemporaryDirectory() as folder:
        written = _written(model, inputs[0], Path(folder))
        found = time_cases(model, inputs, CASES, Path(folder), rounds=rounds, block_s=block_s)
    of_model = {
        "name": timed.name, "what": timed.what, "dtype": timed.dtype,
        "modules": sum(1 for _ in model.modules()), "forward_ms": round(found.base * 1e3, 3),
        **written, "goal_bytes": GOAL_BYTES, "met": written["bytes_per_record"] <= GOAL_BYTES,
        "dropped_rounds": found.dropped,
        "page_faults": {
            "median": round(statistics.median(found.faults), 1),
            "max": round(max(found.faults), 1),
        },
        "foreign_load": {
            "median": round(statistics.median(found.foreign), 4),
            "max": round(max(found.foreign), 4),
        },
    }  # fmt: skip
    return of_model, [_row(timed, case, found) for case in CASES]


def _row(timed: Timed, case: Case, found: Rounds) -> dict[str, Any]:
    ratios = found.ratios[case.name]
    relative = summary(ratios.wall)
    goal = timed.goal if case.recording else None
    return {
        "name": f"{timed.name}: {case.name}", "part": "overhead", "model": timed.name,
        "case": case.name, "ours": case.ours, "goal": goal,
        "forwards_in_block": found.forwards[case.name],
        "met": None if goal is None else relative["median"] <= goal,
        "relative": relative,
        "until_written": summary(ratios.written) if case.recording else None,
        "processor_time": summary(ratios.processor),
    }  # fmt: skip


def _written(model: nn.Module, inputs: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Count what one traced forward writes."""
    path = folder / "one.jsonl"
    with CASES[0].around(model, folder) as wait, torch.no_grad():
        (path,) = folder.rglob("run.jsonl")
        wait()
        before = path.stat().st_size
        model(**inputs)
        wait()
        size = path.stat().st_size - before
    records = len(read(path).records)
    return {
        "records_per_forward": records,
        "bytes_per_forward": size,
        "bytes_per_record": round(size / records, 1),
    }


def table(record: Mapping[str, Any]) -> None:
    """Print the part's tables and what they mean."""
    from rich.table import Table

    from polyattn.bench.report import console, say

    part = record["overhead"]
    rows = [row for row in record["rows"] if row.get("part") == "overhead"]
    for model in part["models"]:
        shown = Table(
            title=f"{model['what']}, {model['dtype']}: {model['forward_ms']:.1f} ms untraced, "
            f"{part['threads']} threads"
        )
        for name in ("forward", "time", "95 %", "until written", "processors", "goal", "met"):
            shown.add_column(name, justify="left" if name == "forward" else "right")
        for row in rows:
            if row["model"] == model["name"]:
                shown.add_row(*_cells(row))
        console().print(shown)
        say(_footer(model))
    say(
        f"time: over that of untraced forwards beside it, median of {part['rounds']} rounds and "
        "its 95 % interval; until written: with what the writing thread has left after the last of "
        "many forwards; processors: processor time of all threads, waiting ones of OpenMP "
        f"included; memory allocator: {part['allocator']}."
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    time, written, goal = row["relative"], row["until_written"], row["goal"]
    return [
        row["case"],
        f"{time['median']:.3f}",
        f"{time['low']:.3f}..{time['high']:.3f}",
        "" if written is None else f"{written['median']:.3f}",
        f"{row['processor_time']['median']:.3f}",
        "" if goal is None else f"{goal:.2f}",
        {None: "", True: "yes", False: "no"}[row["met"]],
    ]


def _footer(model: Mapping[str, Any]) -> str:
    load = model["foreign_load"]
    return (
        f"{model['modules']} modules, {model['records_per_forward']} records and "
        f"{model['bytes_per_forward'] / 1e3:.0f} kB a forward, {model['bytes_per_record']:.0f} "
        f"bytes a record (goal {model['goal_bytes']}); {model['page_faults']['median']:.0f} page "
        f"faults in an untraced forward; others took {load['median']:.0%} of the machine in the "
        f"median round kept, {load['max']:.0%} in the busiest."
    )
