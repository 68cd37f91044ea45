"""One run of ``bench cpu``: every case checked and timed, with its yardsticks, as a record."""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polyattn.bench import machine
from polyattn.bench.cpu import memory
from polyattn.bench.cpu.cache_ways import cache_ways
from polyattn.bench.cpu.case_arrays import Inputs
from polyattn.bench.cpu.cases import CASES, Case, quick
from polyattn.bench.cpu.engines import Engines
from polyattn.bench.cpu.repeats import Series, load, once, over, time_steps
from polyattn.bench.cpu.truth import Truth
from polyattn.bench.cpu.ways import Unable, Way, flex, folded, ours, step, torch_ways
from polyattn.bench.cpu.yardsticks import Yardsticks, native
from polyattn.bench.records import SCHEMA
from polyattn.errors import PolyattnError
from polyattn.native import forms, module

__all__ = ["BACKEND", "Options", "chosen", "in_force", "measure", "require", "timed_case"]

BACKEND = "native_cpu"
_NEAR = 1.25  # torch's math path is timed to the end when it is within this of the fastest
_HOPELESS = 3.0  # and called once only beyond this
_LONG_S = 0.02
_FAR = 50.0  # an engine that takes so many times as long is not timed to the end

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How much is measured. `block_s`: a block of calls; `repeats`: those that are kept.

    `peers`: torch's other ways too; `engines`: those of others, by name.
    """

    repeats: int = 7
    block_s: float = 0.04
    peers: bool = False
    engines: tuple[str, ...] = ()
    quick: bool = False
    only: str = ""
    backend: str = BACKEND


def chosen(options: Options) -> list[Case]:
    """Return the cases to run: those whose name holds the pattern, or matches its wildcards."""
    pattern = options.only
    found = [c for c in CASES if pattern in c.name or fnmatch.fnmatch(c.name, pattern)]
    if not found:
        names = "; ".join(case.name for case in CASES)
        raise PolyattnError(f"got --only {pattern!r}, expected a part of one of: {names}.")
    return [quick(case) for case in found] if options.quick else found


def require(backend: str) -> None:
    """Raise with the reason where the backend cannot run here."""
    ours(Inputs.of(quick(CASES[0])), backend)


def measure(options: Options, say: Say = lambda line: None) -> dict[str, Any]:
    """Time the cases and return the record; `say` hears what is being done."""
    cases = chosen(options)
    sticks = Yardsticks(small=options.quick)
    rows = []
    with Engines(options.engines, torch.get_num_threads()) as engines:
        about = engines.about()
        for case in cases:
            say(case.name)
            for name in ("read", case.dtype) if case.is_decode else (case.dtype,):
                sticks.sample(name)
            rows.append(timed_case(case, options, engines=engines))
    for row, case in zip(rows, cases, strict=True):
        _judge(row, case, sticks)
    extra: list[dict[str, Any]] = []
    if not options.only:
        say("memory")
        extra = memory.rows(options.backend, 2048 if options.quick else 16384)
    judged = [*rows, *(() if options.quick else extra)]
    return {
        **in_force("cpu", options),
        "peers": options.peers,
        "engines": about,
        "yardsticks": sticks.summary(),
        "goals_met": all(row.get("met", True) and not row.get("wrong") for row in judged),
        "memory": extra,
        "rows": rows,
    }


def in_force(kind: str, options: Options) -> dict[str, Any]:
    """Return what a record says of the conditions it was made under."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "command": machine.command_line(kind),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "flags": machine.flags(),
        "backend": options.backend,
        "native": _native(),
        "threads": torch.get_num_threads(),
        "repeats": options.repeats,
        "quick": options.quick,
    }  # fmt: skip


def _native() -> dict[str, Any] | None:
    if native() is None:
        return None
    here, build = module.isas(), module.build_info()
    return {
        "isa": here[module.isa_index()],
        "isas": list(here),
        "pool": module.pool(),
        "bfloat16": forms.described(),
        "build": {**dataclasses.asdict(build), "compiled": list(build.compiled)},
    }


def timed_case(
    case: Case, options: Options, rows: int = 16, engines: Engines | None = None
) -> dict[str, Any]:
    """Check and time one case; the row has everything but the shares of the yardsticks."""
    inputs = Inputs.of(case)
    truth = Truth(inputs, rows)
    own = ours(inputs, options.backend)
    errors, wrong = truth.check(own)
    near, far = _near(list(torch_ways(inputs)), inputs)
    found = (
        *cache_ways(inputs, options.backend),
        *((flex(inputs), folded(inputs)) if options.peers else ()),
    )
    peers = [way for way in found if way is not None]
    if engines is not None:
        peers += _in_time(engines.ways(inputs), inputs, once(step(own, inputs)))
    processes = engines.processes() if engines is not None else ()
    others = [way for way in peers if isinstance(way, Way)]
    steps = {way.name: step(way, inputs) for way in (own, *near, *others)}
    series, quiet = time_steps(
        steps, repeats=options.repeats, block_s=options.block_s, processes=processes
    )
    best = min(near, key=lambda way: series[way.name].median)
    torch_errors, _ = truth.check(best)
    mine, theirs = series[own.name], series[best.name]
    return {
        **case.described(),
        "ours_ms": mine.ms(), "torch_ms": theirs.ms(), "torch_route": best.name,
        "torch_routes_ms": far | {way.name: series[way.name].ms()["median"] for way in near},
        "ratio": over(theirs, mine), "relative": over(mine, theirs),
        "peers": {way.name: _peer(way, series, mine, truth) for way in peers},
        "error": errors, "torch_error": torch_errors, "wrong": wrong,
        "calls_per_block": mine.calls, **load(quiet),
    }  # fmt: skip


def _near(ways: Sequence[Way], inputs: Inputs) -> tuple[list[Way], dict[str, float]]:
    """Return torch's routes worth timing to the end, and the ms of a call of the others.

    The flash routes always are: a few calls that something disturbed must not rule them out.
    """
    single: dict[str, float] = {}
    for way in ways:
        one = step(way, inputs)
        single[way.name] = once(one)
        if single[way.name] <= _HOPELESS * min(single.values()):
            tries = 2 if single[way.name] > _LONG_S else 6
            single[way.name] = min(once(one) for _ in range(tries))
    limit = _NEAR * min(single.values())
    near = [w for w in ways if w.name.startswith("flash") or single[w.name] <= limit]
    kept = {way.name for way in near}
    return near, {n: _round(s * 1e3) for n, s in single.items() if n not in kept}


def _in_time(ways: Iterable[Way | Unable], inputs: Inputs, ours_s: float) -> Iterator[Way | Unable]:
    """Yield the ways; of one that is far behind, that it is."""
    for way in ways:
        if isinstance(way, Way):
            times = once(step(way, inputs)) / ours_s
            yield Unable(way.name, f"takes {times:.0f} times as long") if times > _FAR else way
        else:
            yield way


def _peer(
    way: Way | Unable, series: Mapping[str, Series], mine: Series, truth: Truth
) -> dict[str, Any]:
    if isinstance(way, Unable):
        return {"unable": way.why}
    right = truth if way.stands_for is None else Truth(way.stands_for, len(truth.rows))
    errors, wrong = right.check(way)
    theirs = series[way.name]
    return {
        "ms": theirs.ms(),
        "ratio": over(theirs, mine),
        "error": errors,
        "wrong": wrong,
        "prepare_s": {name: _round(seconds) for name, seconds in way.prepare_s},
    }


def _judge(row: dict[str, Any], case: Case, sticks: Yardsticks) -> None:
    """Add the shares of peak and bandwidth, and whether the goals are met."""
    for who in ("ours", "torch"):
        seconds = row[f"{who}_ms"]["median"] / 1e3
        if case.is_decode:
            gbs = case.kv_bytes / seconds / 1e9
            row[f"{who}_gbs"], row[f"{who}_share"] = _round(gbs), _round(gbs / sticks.of("read"))
        else:
            rate = case.useful_flops / seconds / 1e9
            row[f"{who}_gflops"] = _round(rate)
            row[f"{who}_share"] = _round(rate / sticks.of(case.dtype))
    if case.goal is None:
        return
    met = row["ratio"]["median"] >= case.goal and not row["wrong"]
    row["met"] = met and (case.goal_gbs is None or row["ours_gbs"] >= case.goal_gbs)


def _round(value: float) -> float:
    return float(f"{value:.4g}") if math.isfinite(value) else value
