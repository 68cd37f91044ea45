"""The command ``polyattn bench offload``: its options, its record, and its table."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyattn.errors import MissingDependency, PolyattnError

__all__ = ["add", "run"]

PARTS = ("schedules", "memory", "models", "disk", "gpu")
_SCHEDULES, _QUICK_SCHEDULES = 10_000, 500
_BLOCKS, _QUICK_BLOCKS = 24, 8
_GOALS = {"over_bound": 1.10, "over_predicted": 1.10, "over_planned_peak": 1.05}
_PEAK_SLACK, _LOCKED_AT_MOST = 64 << 20, 1.01
_INTERRUPTED = 130
_MEMORY = "/dev/shm"  # schedules are about orders, not about a disk
Say = Callable[[str], None]


def add(kinds: Any) -> None:
    """Add the command to those of ``polyattn bench``."""
    made = kinds.add_parser(
        "offload",
        help="whether offload gives the same bits, and the time and memory that its plan says",
        description="Random schedules on a simulated device; small models of transformers and "
        "diffusers, offloaded, in many situations; a model larger than its limit from a disk.",
    )
    made.add_argument("--quick", action="store_true", help="a part of each, in two minutes")
    made.add_argument("--only", metavar="PART", choices=PARTS, help=f"one of {', '.join(PARTS)}")
    made.add_argument("--folder", metavar="DIR", help="on the disk that is read (the temporary)")
    made.add_argument("--json", action="store_true", help="print the record, not the table")
    made.add_argument(
        "--record",
        metavar="FILE",
        nargs="?",
        const="",
        help="write the record; without FILE to benchmarks/results/<machine>/offload.json",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return 0 if all goals are met, 1 if not, 130 if interrupted."""
    if options.record == "" and (options.quick or options.only):
        raise PolyattnError(
            "got --record without FILE beside --quick or --only, expected a whole run for the "
            "record of the machine; name a FILE."
        )
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("got `bench offload` without PyTorch, expected torch")
    from polyattn.bench import machine, records
    from polyattn.bench.report import say

    rows: list[dict[str, Any]] = []
    interrupted = False
    try:
        for part in PARTS if options.only is None else (options.only,):
            rows += _RUNS[part](options, lambda line: say(line, error=True))
    except KeyboardInterrupt:
        interrupted = True
    here = machine.describe() | (machine.accelerator() if options.only == "gpu" and rows else {})
    record = {
        "schema": records.SCHEMA, "kind": "offload", "command": machine.command_line("offload"),
        "machine": here, "versions": machine.versions(), "flags": machine.flags(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "goals_met": all(row["met"] for row in rows), "interrupted": interrupted, "rows": rows,
    }  # fmt: skip
    if options.json:
        say(records.dump(record), plain=True)
    else:
        _print(record)
    if options.record is not None and not interrupted:
        path = Path(options.record or records.default_path(record, "offload"))
        records.write(record, path)
        say(f"record: {path}", error=options.json)
    return _INTERRUPTED if interrupted else 0 if record["goals_met"] else 1


def _schedules(options: argparse.Namespace, say: Say) -> list[dict[str, Any]]:
    from polyattn.bench.offload.schedules import wrong_in

    count = _QUICK_SCHEDULES if options.quick else _SCHEDULES
    wrong = []
    with tempfile.TemporaryDirectory(dir=_MEMORY if os.path.isdir(_MEMORY) else None) as folder:
        for seed in range(count):
            if seed % 1000 == 0:
                say(f"schedules {seed:,}/{count:,}")
            found = wrong_in(seed, Path(folder))
            if found is not None:
                wrong.append(found)
    text = f"{count:,} random orders of copies and computations, {len(wrong)} with a wrong byte"
    return [{"name": "schedules", "text": text, "wrong": wrong[:5], "met": not wrong}]


def _memory(options: argparse.Namespace, say: Say) -> list[dict[str, Any]]:
    """Weigh what offload holds on a device, and what it locks on the host."""
    from polyattn.bench.offload.weighed import locked, peaks

    say("memory: weights on the device, and locked on the host")
    return [peaks(_PEAK_SLACK), locked(_LOCKED_AT_MOST)]


def _models(options: argparse.Namespace, say: Say) -> list[dict[str, Any]]:
    from polyattn.bench.offload.architectures import PACKAGES, names

    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(f"got no {package}, expected pip install 'polyattn[bench]'")
    step = 20 if options.quick else 1
    return [_models_row(package, names(package)[::step], options, say) for package in PACKAGES]


def _models_row(
    package: str, chosen: list[str], options: argparse.Namespace, say: Say
) -> dict[str, Any]:
    """Offload each in processes of their own, as many at once as there are processors."""
    from polyattn.bench.models.processes import Examiners

    rows: list[Any] = []

    def heard(row: Any) -> None:
        rows.append(row)
        if len(rows) % 20 == 0 or row.extra:
            say(f"{package} {len(rows)}/{len(chosen)}: {row.name} {row.outcome} {row.extra or ''}")

    environment = {"OMP_NUM_THREADS": "1"} | (
        {"TMPDIR": os.path.abspath(options.folder)} if options.folder else {}
    )
    Examiners(
        "polyattn.bench.offload.architectures", jobs=os.cpu_count() or 1,
        environment=environment,
    ).run(chosen, heard)  # fmt: skip
    return _verdict(package, sorted(rows, key=lambda row: row.name))


def _verdict(package: str, rows: list[Any]) -> dict[str, Any]:
    tried = [row for row in rows if row.outcome in ("equal", "different")]
    refused = {row.name: row.reason for row in rows if row.outcome == "not built"}
    whole = sum(row.outcome == "one block" for row in rows)
    situations = {situation for row in tried for situation in (*row.cases, *row.extra)}
    wrong = {f"{row.name}, {name}": said for row in tried for name, said in row.extra.items()}
    wrong |= {row.name: row.reason for row in rows if row.outcome in ("crashed", "cut short")}
    text = (
        f"{len(tried)} architectures in {len(situations)} situations, "
        f"{sum(len(row.cases) for row in tried):,} times the same bits, {len(wrong)} not "
        f"({len(refused)} were not built small, {whole} have one block)"
    )
    return {"name": package, "text": text, "wrong": wrong, "not_built": refused, "met": not wrong}


def _disk(options: argparse.Namespace, say: Say) -> list[dict[str, Any]]:
    from polyattn.bench.offload.disk_run import write_weights

    blocks = _QUICK_BLOCKS if options.quick else _BLOCKS
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "model.safetensors"
        say(f"disk: writing {blocks} blocks")
        nbytes = write_weights(path, blocks)
        for tokens in (1, 64, 512):
            budget = str(int(nbytes * 0.5) + (300 << 20))
            say(f"disk: {tokens} tokens, {nbytes >> 20} MiB under {int(budget) >> 20} MiB")
            rows.append(_disk_row(path, blocks, budget, tokens, 3 if options.quick else 7))
    return rows


def _disk_row(path: Path, blocks: int, budget: str, tokens: int, passes: int) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "polyattn.bench.offload.disk_run", str(path), str(blocks), budget,
        str(tokens), str(passes),
    ]  # fmt: skip
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    name = f"disk, {tokens} tokens"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"name": name, "text": f"failed: {last}", "met": False}
    found = json.loads(done.stdout)
    text = (
        f"{found['streamed']} of {blocks} blocks stream, a pass {found['pass_s']:.3f} s: "
        f"{found['over_bound']:.2f} x max(compute, read), {found['over_both']:.2f} x both at once "
        f"without offload, {found['over_predicted']:.2f} x as predicted; peak "
        f"{found['peak_bytes'] >> 20} MiB of {int(budget) >> 20}, "
        f"{found['over_planned_peak']:.3f} x as planned"
    )
    met = (
        found["over_bound"] <= _GOALS["over_bound"]
        and abs(found["over_predicted"] - 1) <= _GOALS["over_predicted"] - 1
        and abs(found["over_planned_peak"] - 1) <= _GOALS["over_planned_peak"] - 1
        and found["peak_bytes"] <= int(budget)
    )
    took = time.perf_counter() - began
    return {"name": name, "text": text, "met": met, "took_s": took, "goals": _GOALS, **found}


def _gpu(options: argparse.Namespace, say: Say) -> list[dict[str, Any]]:
    """Stream stacks like Wan's and Flux's to a GPU, beside accelerate and diffusers."""
    from polyattn.bench.offload.gpu_run import STACKS, measure

    if not importlib.import_module("torch").cuda.is_available():
        say("gpu: there is none, so nothing of it is measured")
        return []
    rows = []
    for name in STACKS:
        say(f"gpu: {name}")
        rows.append(measure(name, passes=3 if options.quick else 7, folder=options.folder))
    return rows


_RUNS: dict[str, Callable[[argparse.Namespace, Say], list[dict[str, Any]]]] = {
    "schedules": _schedules,
    "memory": _memory,
    "models": _models,
    "disk": _disk,
    "gpu": _gpu,
}


def _print(record: Mapping[str, Any]) -> None:
    from rich.table import Table

    from polyattn.bench.report import conditions, console, say

    table = Table(title="offload: the same bits, and the time and memory of its plan")
    for name in ("part", "found", "met"):
        table.add_column(name, overflow="fold")
    for row in record["rows"]:
        table.add_row(row["name"], row["text"], "yes" if row["met"] else "no")
    console().print(table)
    for row in record["rows"]:
        wrong = row.get("wrong") or ()
        for each in list(wrong)[:20]:
            say(f"  {each}: {wrong[each]}" if isinstance(wrong, dict) else f"  {each}")
    say(conditions(record))
