"""One run of ``bench gpu``: each case checked against float64, timed beside torch's, and judged.

Times are the device's own, between two events around a block of calls in a row: where a kernel is
shorter than the call that starts it, they are what the calls take.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from polyattn.bench import machine
from polyattn.bench.cpu.bench_cpu import Options, in_force
from polyattn.bench.cpu.case_arrays import Inputs
from polyattn.bench.cpu.cases import Case
from polyattn.bench.cpu.repeats import Series, Step, load, over, time_steps
from polyattn.bench.cpu.truth import Truth
from polyattn.bench.cpu.ways import Unable, Way, step
from polyattn.bench.gpu.gpu_cases import chosen
from polyattn.bench.harm import calls
from polyattn.bench.harm.calls import ATTENTION, DROP_IN, STOCK
from polyattn.bench.harm.whole_run import LEAST, tuning
from polyattn.errors import PolyattnError
from polyattn.selection.registry import registry

__all__ = ["BACKENDS", "measure"]

BACKENDS = ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex")
"""What is forced beside the choice; the unfused ones materialise the scores."""
_WARM = 3
_ROWS = 16

Say = Callable[[str], None]
Row = dict[str, Any]


def measure(
    *,
    only: str = "",
    quick: bool = False,
    tuned: bool = False,
    repeats: int = 5,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Time the cases and return the record; `say` hears what is being done.

    Raises PolyattnError where there is no CUDA device, or `only` names nothing.
    """
    if not torch.cuda.is_available():
        raise PolyattnError(
            "got a machine on which torch sees no CUDA device, expected one: `polyattn bench cpu` "
            "and `bench harm` measure processors."
        )
    cases, rows = chosen(only, quick), []
    with tuning(tuned) as times:
        for number, case in enumerate(cases):
            say(f"{number + 1}/{len(cases)} {case.name}")
            rows.append(_timed(case, repeats))
        conditions = in_force("gpu", Options(repeats=repeats, quick=quick, backend="automatic"))
    conditions["machine"] |= machine.accelerator()
    return conditions | {"tuned": tuned, "times": times} | _judged(rows) | {"rows": rows}


def _timed(case: Case, repeats: int) -> Row:
    inputs = Inputs.of(case, "cuda")
    truth = Truth(inputs.on("cpu"), _ROWS, of=inputs)
    ways, unable = _ways(inputs)
    selections = {way.name: calls.ran(way, inputs) for way in ways[1:3]}
    checked = {}
    for way in list(ways[1:]):
        try:
            checked[way.name] = truth.check(way)
        except Exception as error:  # what a kernel raises is the finding
            checked[way.name] = {}, f"{type(error).__name__}: {error}".splitlines()[0]
            ways.remove(way)
    steps = {way.name: _on_device(step(way, inputs)) for way in ways}
    for one in steps.values():
        assert one.timed is not None
        one.timed(_WARM)
    series, quiet = time_steps(steps, repeats=repeats, block_s=0.01)
    return {
        **case.described(), **_figures(case, series), **load(quiet),
        "choices": {name: _told(found) for name, found in selections.items()},
        "unable": {one.name: one.why for one in unable},
        "error": {name: errors for name, (errors, _) in checked.items()},
        "wrong": "; ".join(f"{name}: {why}" for name, (_, why) in checked.items() if why),
    }  # fmt: skip


def _ways(inputs: Inputs) -> tuple[list[Way], list[Unable]]:
    """Return torch's own call, ours by both names, each backend; and which cannot, and why."""
    ways = [calls.stock(inputs), calls.drop_in(inputs), calls.by_value(inputs)]
    unable = []
    plain = inputs.case.mask in ("none", "causal")
    for name in BACKENDS:
        if name == "flex" and plain:  # compiles for seconds, for what others have kernels for
            continue
        one = calls.forced(inputs, name) if name in registry.names("torch") else None
        if isinstance(one, Unable):
            unable.append(one)
        elif one is not None:
            ways.append(one)
    return ways, unable


def _on_device(one: Step) -> Step:
    """Return the step timed by the device's events."""

    def timed(count: int) -> tuple[float, float]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with one.scope():
            first.record()
            for _ in range(count):
                one.run()
            last.record()
        last.synchronize()
        return max(first.elapsed_time(last) / 1e3, 1e-9), 0.0

    return Step(one.run, one.scope, timed)


def _figures(case: Case, series: Mapping[str, Series]) -> Row:
    stock = series[STOCK]
    ratios = {name: over(stock, one) for name, one in series.items() if name != STOCK}
    call = min((DROP_IN, ATTENTION), key=lambda name: ratios[name]["median"])
    forced = {name: ratios[name] for name in BACKENDS if name in ratios}
    best = max(forced, key=lambda name: forced[name]["median"], default=None)
    return {
        "torch_ms": stock.ms(), "ours_ms": series[call].ms(), "call": call,
        "ratio": ratios[call], "relative": over(series[call], stock), "ratios": ratios,
        "tflops": round(case.useful_flops / series[call].median / 1e12, 1),
        "kv_gb_s": round(case.kv_bytes / series[call].median / 1e9) if case.is_decode else None,
        "best": best,
        "calls_per_block": series[call].calls,
    }  # fmt: skip


def _told(selection: Any) -> Row:
    return {
        "chosen": selection.backend, "chosen_by": str(selection.source),
        "reason": selection.reason,
    }  # fmt: skip


def _judged(rows: list[Row]) -> Row:
    """Return what all rows say together: harm, and what is wrong."""
    harmed = [row["name"] for row in rows if row["ratio"]["median"] < LEAST]
    wrong = [row["name"] for row in rows if row["wrong"]]
    return {
        "least": LEAST, "harmed": harmed, "wrong": wrong,
        "mean_ratio": round(math.exp(statistics.fmean(_logs(rows))), 3),
        "goals_met": not (harmed or wrong),
    }  # fmt: skip


def _logs(rows: list[Row]) -> Iterator[float]:
    return (math.log(row["ratio"]["median"]) for row in rows)
