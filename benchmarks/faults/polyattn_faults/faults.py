"""The fault-injection suite: bugs and clean ports of every architecture, and who is named."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyattn.bench.trace.bench_trace import Options
from polyattn.errors import MissingDependency
from polyattn.trace.recorders.torch.weights import remembered_fingerprints
from polyattn_faults.answers import Reference, answer, said
from polyattn_faults.architectures import ARCHITECTURES, Architecture, chosen
from polyattn_faults.clean import PORTS
from polyattn_faults.screen import table
from polyattn_faults.seeding import faults

__all__ = ["GOALS", "measure", "of_architecture", "table"]

GOALS = {"float32": 0.98, "bfloat16": 0.85}
"""The share of the bugs with an effect of which the culprit is named exactly."""

_OF_KIND = {"float32": (2, 4), "bfloat16": (1, 2)}
"""Bugs of each kind in a model, and of the kinds that go into each layer."""

_RENAMED = 4
"""Each fourth bug is in a port whose modules and classes have other names."""


def measure(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Seed the bugs, make the clean ports, and return the rows and what they add up to."""
    for package in ("transformers", "diffusers"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(
                f"got `bench trace` without {package}, whose models the bugs go into: "
                "pip install 'polyattn[bench]'"
            )
    began = time.monotonic()
    models = chosen(options.models, options.quick)
    asked = [(one.name, dtype) for dtype in options.dtypes for one in models]
    rows = [row for found in _all(asked, options, say) for row in found]
    sums = {dtype: summary(rows, dtype) for dtype in options.dtypes}
    return {
        "goals": GOALS,
        "seconds": round(time.monotonic() - began, 1),
        "sums": sums,
        "goals_met": all(one["met"] for one in sums.values()),
        "rows": rows,
    }


Task = tuple[str, str]


def _all(
    asked: Sequence[Task], options: Options, say: Callable[[str], None]
) -> list[list[dict[str, Any]]]:
    """Do each architecture in each dtype, as many at once as there are processors for."""
    workers = min(len(asked), _processors())
    if workers < 2:
        found = []
        for name, dtype in asked:
            say(f"{name} {dtype}")
            found.append(of_architecture(name, dtype, options))
        return found
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            # the last of the architectures take longest: none of them is to run alone in the end
            tasks = {pool.submit(of_architecture, *task, options): task for task in asked[::-1]}
            for at, task in enumerate(as_completed(tasks)):
                task.result()
                say(f"{at + 1}/{len(asked)} {' '.join(tasks[task])}")
            return [task.result() for task in reversed(tasks)]
        except BaseException:  # an interrupt: what has not begun is not begun any more
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def of_architecture(name: str, dtype: str, options: Options) -> list[dict[str, Any]]:
    """Return a row for each bug and each clean port of one architecture."""
    with _quiet(), _one_thread(), remembered_fingerprints():
        return _of_architecture(ARCHITECTURES[name], dtype, options)


def _of_architecture(
    architecture: Architecture, dtype: str, options: Options
) -> list[dict[str, Any]]:
    kind: torch.dtype = getattr(torch, dtype)
    model, inputs = architecture.build(options.seed, kind)
    port, _ = architecture.build(options.seed, kind)
    few, many = (1, 1) if options.quick else _OF_KIND[dtype]
    seeded = faults(port, inputs, of_kind=few, every_layer=many, seed=options.seed)
    if options.quick:
        seeded = seeded[options.seed % 3 :: 3]
    common = {"part": "faults", "architecture": architecture.name, "dtype": dtype}
    rows = []
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        reference = Reference(model, inputs, kind, Path(folder))
        for at, fault in enumerate(seeded):
            torch.manual_seed(options.seed)  # of dropout that is left on
            row = answer(reference, port, fault, other_names=at % _RENAMED == 1)
            rows.append(_named(common | row))
        rows += [_named(common | row) for row in _clean(reference, port)]
    return rows


def _named(row: dict[str, Any]) -> dict[str, Any]:
    at = f" at {row['at']}" if row.get("at") else ""
    at += ", renamed" if row.get("renamed") else ""
    return {"name": f"{row['architecture']} {row['dtype']}: {row['kind']}{at}"} | row


def _clean(reference: Reference, port: nn.Module) -> Iterator[dict[str, Any]]:
    for way in PORTS:
        with way.made(port) as made:
            if made is None:
                continue
            verdict = reference.verdict(made)
        flagged = verdict.culprit is not None
        outcome = "flagged" if flagged else "same" if verdict.equal else "cannot say"
        yield {
            "kind": way.name,
            "clean": True,
            "outcome": outcome,
            "said": said(verdict),
            "compared": verdict.coverage.compared,
            "modules": verdict.coverage.reference,
        }


def summary(rows: Sequence[Mapping[str, Any]], dtype: str) -> dict[str, Any]:
    """Return the counts of one dtype, the share that was named, and whether the goals are met."""
    of = [row for row in rows if row["dtype"] == dtype]
    counted = [row for row in of if row.get("counted")]
    clean = [row for row in of if row.get("clean")]
    exact = sum(row["outcome"] == "exact" for row in counted)
    flagged = sum(row["outcome"] == "flagged" for row in clean)
    share = exact / len(counted) if counted else 0.0
    return {
        "seeded": len(counted),
        "exact": exact,
        "share": round(share, 4),
        "renamed": sum(row["renamed"] for row in counted),
        "without_effect": sum(row.get("counted") is False for row in of),
        "crashed": sum(row["outcome"] == "crashed" for row in of),
        "kinds": len({row["kind"] for row in counted}),
        "clean": len(clean),
        "flagged": flagged,
        "clean_cannot_say": sum(row["outcome"] == "cannot say" for row in clean),
        "met": bool(counted) and share >= GOALS[dtype] and not flagged,
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the libraries' remarks on configurations that nobody would train."""
    for name in ("transformers", "diffusers"):
        importlib.import_module(f"{name}.utils.logging").get_logger(name)  # it sets its own level
    levels = {name: logging.getLogger(name).level for name in ("transformers", "diffusers")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for name in levels:
                logging.getLogger(name).setLevel(logging.ERROR)
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """So that sums are the same on every machine, and small models run fastest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
