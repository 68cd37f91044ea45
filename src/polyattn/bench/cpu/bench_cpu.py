"""One run of ``bench cpu``: every case checked and timed, with its yardsticks, as a record."""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from polyattn.bench import machine
from polyattn.bench.cpu import memory
from polyattn.bench.cpu.cache_ways import cache_ways
from polyattn.bench.cpu.case_arrays import Inputs
from polyattn.bench.cpu.cases import CASES, Case, quick
from polyattn.bench.cpu.engines import Engines
from polyattn.bench.cpu.goals import OTHERS, Processors, processors_like, verdicts
from polyattn.bench.cpu.limits import limit
from polyattn.bench.cpu.repeats import Series, load, once, over, time_steps
from polyattn.bench.cpu.room import EVERY_HEAD, OURS, lacking
from polyattn.bench.cpu.truth import Truth
from polyattn.bench.cpu.ways import Unable, Way, flex, folded, ours, step, torch_ways
from polyattn.bench.cpu.yardsticks import Yardsticks, native
from polyattn.bench.records import SCHEMA
from polyattn.bench.timing import Rounds
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


def chosen(options: Options, processors: Processors = OTHERS) -> list[Case]:
    """Return the cases to run: those whose name holds the pattern, or matches its wildcards.

    With the goals over torch of such processors.
    """
    pattern = options.only
    found = [c for c in CASES if pattern in c.name or fnmatch.fnmatch(c.name, pattern)]
    if not found:
        names = "; ".join(case.name for case in CASES)
        raise PolyattnError(f"got --only {pattern!r}, expected a part of one of: {names}.")
    if options.quick:
        return [quick(case) for case in found]
    return [
        dataclasses.replace(case, goal=processors.goal(f"{case.group} {case.size}", case.dtype))
        for case in found
    ]


def require(backend: str) -> None:
    """Raise with the reason where the backend cannot run here."""
    ours(Inputs.of(quick(CASES[0])), backend)


def measure(options: Options, say: Say = lambda line: None) -> dict[str, Any]:
    """Time the cases and return the record; `say` hears what is being done."""
    about = in_force("cpu", options)
    processors = processors_like(about["machine"])
    cases = chosen(options, processors)
    left_out = {case.name: why for case in cases if (why := lacking(case, OURS))}
    cases = [case for case in cases if case.name not in left_out]
    sticks = Yardsticks(small=options.quick)
    rows = []
    with Engines(options.engines, torch.get_num_threads()) as engines:
        found = engines.about()
        for case in cases:
            say(case.name)
            for name in ("read", case.dtype):
                sticks.sample(name)
            rows.append(timed_case(case, options, engines=engines))
    sticks.sample("read")
    for row, case in zip(rows, cases, strict=True):
        _judge(row, case, sticks, None if options.quick else processors, peers=bool(found))
    extra: list[dict[str, Any]] = []
    if not options.only:
        say("memory")
        extra = memory.rows(options.backend, 2048 if options.quick else 16384)
    judged = [*rows, *(() if options.quick else extra)]
    return {
        **about,
        "peers": options.peers,
        "engines": found,
        "goals_of": processors.name,
        "yardsticks": sticks.summary(),
        "goals_met": all(row.get("met", True) and not row.get("wrong") for row in judged),
        "left_out": left_out,
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
    """Check and time one case; the row has everything but what rests on the yardsticks."""
    inputs = Inputs.of(case)
    truth = Truth(inputs, rows)
    own = ours(inputs, options.backend)
    errors, wrong = truth.check(own)
    near, far = _near(inputs)
    peers: dict[str, dict[str, Any]] = {}
    series: dict[str, Series] = {}
    quiet = Rounds()
    for ways in _parties(inputs, options, engines):
        able = [way for way in ways if isinstance(way, Way)]
        right = {way.name: _checked(way, truth) for way in able}
        timed = [own, *(near if not series else ()), *able]
        found, load_of = time_steps(
            {way.name: step(way, inputs) for way in timed}, repeats=options.repeats,
            block_s=options.block_s, processes=engines.processes() if engines is not None else (),
        )  # fmt: skip
        peers |= {way.name: _peer(way, found, found[own.name], right) for way in ways}
        if not series:
            series, quiet = found, load_of
    best = min(near, key=lambda way: series[way.name].median)
    torch_errors, _ = truth.check(best)
    mine, theirs = series[own.name], series[best.name]
    return {
        **case.described(),
        "ours_ms": mine.ms(), "torch_ms": theirs.ms(), "torch_route": best.name,
        "torch_routes_ms": far | {way.name: series[way.name].ms()["median"] for way in near},
        "ratio": over(theirs, mine), "relative": over(mine, theirs), "peers": peers,
        "error": errors, "torch_error": torch_errors, "wrong": wrong,
        "calls_per_block": mine.calls, **load(quiet),
    }  # fmt: skip


def _parties(
    inputs: Inputs, options: Options, engines: Engines | None
) -> Iterator[list[Way | Unable]]:
    """Yield what is timed in turns with ours: first what runs in this process too."""
    found = (
        *cache_ways(inputs, options.backend),
        *((flex(inputs), folded(inputs)) if options.peers else ()),
    )
    here = [way for way in found if way is not None]
    own_s = once(step(ours(inputs, options.backend), inputs))
    for party in engines.parties(inputs) if engines is not None else [[]]:
        yield [*here, *_in_time(party, inputs, own_s)]
        here = []


def _near(inputs: Inputs) -> tuple[list[Way], dict[str, float | None]]:
    """Return torch's routes worth timing to the end, and the ms of a call of the others.

    The flash routes always are: a few calls that something disturbed must not rule them out. The
    math path copies keys and values for each query head; where that does not fit it has no time.
    """
    size = inputs.case.size
    fits = not lacking(inputs.case, EVERY_HEAD * size.heads / size.kv_heads)
    ways = [way for way in torch_ways(inputs) if fits or way.name != "math"]
    single: dict[str, float] = {}
    for way in ways:
        one = step(way, inputs)
        single[way.name] = once(one)
        if single[way.name] <= _HOPELESS * min(single.values()):
            tries = 2 if single[way.name] > _LONG_S else 6
            single[way.name] = min(once(one) for _ in range(tries))
    limit_s = _NEAR * min(single.values())
    near = [w for w in ways if w.name.startswith("flash") or single[w.name] <= limit_s]
    kept = {way.name for way in near}
    far: dict[str, float | None] = {} if fits else {"math": None}
    return near, far | {n: _round(s * 1e3) for n, s in single.items() if n not in kept}


def _in_time(ways: Iterable[Way | Unable], inputs: Inputs, ours_s: float) -> Iterator[Way | Unable]:
    """Yield the ways; of one that is far behind, that it is."""
    for way in ways:
        if isinstance(way, Way):
            times = once(step(way, inputs)) / ours_s
            yield Unable(way.name, f"takes {times:.0f} times as long") if times > _FAR else way
        else:
            yield way


def _checked(way: Way, truth: Truth) -> tuple[dict[str, float], str]:
    right = truth if way.stands_for is None else Truth(way.stands_for(), len(truth.rows))
    return right.check(way)


def _peer(
    way: Way | Unable,
    series: Mapping[str, Series],
    mine: Series,
    right: Mapping[str, tuple[dict[str, float], str]],
) -> dict[str, Any]:
    if isinstance(way, Unable):
        return {"unable": way.why}
    (errors, wrong), theirs = right[way.name], series[way.name]
    return {
        "ms": theirs.ms(),
        "ratio": over(theirs, mine),
        "error": errors,
        "wrong": wrong,
        "prepare_s": {name: _round(seconds) for name, seconds in way.prepare_s},
    }


def _judge(
    row: dict[str, Any],
    case: Case,
    sticks: Yardsticks,
    processors: Processors | None,
    *,
    peers: bool,
) -> None:
    """Add the shares of peak and read rate, what limits the row, and whether goals are met."""
    stick, unit, work = (
        ("read", "gbs", case.kv_bytes)
        if case.is_decode
        else (case.dtype, "gflops", case.useful_flops)
    )
    for who in ("ours", "torch"):
        rate = work / (row[f"{who}_ms"]["median"] / 1e3) / 1e9
        row[f"{who}_{unit}"] = _round(rate)
        row[f"{who}_share"] = _round(rate / sticks.of(stick))
    row["limit"] = limit(row)
    if processors is not None and (goals := list(verdicts(row, processors, peers=peers))):
        row["goals"] = goals
        row["met"] = all(one["met"] for one in goals) and not row["wrong"]


def _round(value: float) -> float:
    return float(f"{value:.4g}") if math.isfinite(value) else value
