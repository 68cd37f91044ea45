"""One run of ``bench harm``: every problem checked, timed beside torch's own call, and judged.

A problem is timed for a short while; what seems slower is timed again for longer, and only that
counts, so that noise is no finding. What stays slower while others kept the machine busy cannot be
told from noise: it is neither harm nor none.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from polyattn import settings
from polyattn.bench.cpu.bench_cpu import BACKEND, Options, in_force
from polyattn.bench.cpu.case_arrays import Inputs
from polyattn.bench.cpu.repeats import Series, load, once, over, time_steps
from polyattn.bench.cpu.truth import Truth
from polyattn.bench.cpu.ways import Unable, step
from polyattn.bench.harm import calls
from polyattn.bench.harm.calls import ATTENTION, DROP_IN, STOCK
from polyattn.bench.harm.problems import UserCase, chosen
from polyattn.errors import PolyattnError

__all__ = ["LEAST", "LOUD", "judged", "measure", "settled", "timed", "tuning"]

LEAST = 0.95
"""The least of torch's time over ours that is no harm."""
LOUD = 0.25
"""The share of all cores that others took in the median repeat beyond which nothing is judged."""
_SEEMS = 0.98
_CLEAR_S = 0.05  # from this long on, few repeats are enough for what is clearly faster
_CLEARLY = 1.5
_ROWS = 4
_FEW = Options(repeats=2, block_s=0.006)
_FIRST = Options(repeats=3, block_s=0.006)
_AGAIN = Options(repeats=9, block_s=0.02)
_UNTUNED = "an empty cache directory: no tuned times, and what is calibrated is calibrated anew"

Say = Callable[[str], None]
Row = dict[str, Any]


def measure(
    *, only: str = "", quick: bool = False, tuned: bool = False, say: Say = lambda line: None
) -> dict[str, Any]:
    """Time the problems and return the record; `say` hears what is being done.

    Ctrl-C ends it with the rows that were measured, and "interrupted".
    Raises PolyattnError where the choice is not automatic here, or `only` names nothing.
    """
    cases, begin = chosen(only, quick), time.monotonic()
    rows: list[Row] = []
    interrupted = False
    with tuning(tuned) as times:
        try:
            for number, case in enumerate(cases):
                say(f"{number + 1}/{len(cases)} {case.name}")
                rows.append(timed(case))
        except KeyboardInterrupt:
            if not rows:
                raise
            interrupted = True
        conditions = in_force("harm", Options(repeats=_FIRST.repeats, quick=quick))
    took = round(time.monotonic() - begin)
    conditions |= {"backend": "automatic", "tuned": tuned, "times": times, "took_s": took}
    return conditions | judged(rows) | {"interrupted": interrupted, "rows": rows}


@contextmanager
def tuning(tuned: bool) -> Iterator[str]:
    """Leave out what was tuned on this machine, unless asked for; the value says which it was."""
    with ExitStack() as stack:
        where, here = "the cache directory of the user", settings.current()
        if not tuned:
            empty = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="polyattn-", ignore_cleanup_errors=True)
            )
            here = stack.enter_context(settings.within({"POLYATTN_CACHE_DIR": empty}))
            where = _UNTUNED
        if here.backend is not None:
            raise PolyattnError(
                f"got POLYATTN_BACKEND={here.backend}, expected it unset: the choice that is "
                "measured is the automatic one."
            )
        yield where + ("" if here.tuning else "; POLYATTN_TUNING=off")


def timed(case: UserCase) -> Row:
    """Check and time one problem; what seems slower is timed again, for longer."""
    inputs = Inputs.of(case)
    truth = Truth(inputs, _ROWS)
    stock, mine = calls.stock(inputs), [calls.drop_in(inputs), calls.by_value(inputs)]
    chosen = {way.name: calls.ran(way, inputs) for way in mine}
    native = calls.forced(inputs, BACKEND)
    known = chosen[ATTENTION].backend == BACKEND  # the forced call would be the same again
    extra = [] if known or isinstance(native, Unable) else [native]
    checked = {way.name: truth.check(way) for way in (*mine, *extra)}
    steps = {way.name: step(way, inputs) for way in (stock, *mine, *extra)}
    seconds = {name: once(one) for name, one in steps.items()}

    def measured(how: Options) -> Row:
        series, quiet = time_steps(steps, repeats=how.repeats, block_s=how.block_s)
        return _ratios(series) | load(quiet)

    row = settled(measured, _is_clear(seconds))
    native_ratio = row["ratios"].get(ATTENTION if known else BACKEND)
    return {
        **case.described(), "numbers": case.numbers, **row,
        "native_ratio": native_ratio,
        "native_unable": native.why if isinstance(native, Unable) else "",
        "choices": {name: _told(selection) for name, selection in chosen.items()},
        **_told(chosen[row["call"]]),
        "error": {name: errors for name, (errors, _) in checked.items()},
        "wrong": "; ".join(f"{name}: {why}" for name, (_, why) in checked.items() if why),
    }  # fmt: skip


def settled(measured: Callable[[Options], Row], clear: bool = False) -> Row:
    """Return what was measured, the second time for what seemed slower the first time."""
    row = measured(_FEW if clear else _FIRST)
    if row["ratio"]["median"] >= _SEEMS:
        return row | {"seemed": None}
    return measured(_AGAIN) | {"seemed": row["ratio"]["median"]}


def _is_clear(seconds: Mapping[str, float]) -> bool:
    """Say whether a long problem is so much faster than torch's call that few repeats will do."""
    slowest = max(seconds[name] for name in (DROP_IN, ATTENTION))
    return seconds[STOCK] >= max(_CLEAR_S, _CLEARLY * slowest)


def _ratios(series: Mapping[str, Series]) -> Row:
    """Return what a row says of the times; its own ratio is that of the slower of our calls."""
    stock = series[STOCK]
    ratios = {name: over(stock, one) for name, one in series.items() if name != STOCK}
    call = min((DROP_IN, ATTENTION), key=lambda name: ratios[name]["median"])
    return {
        "torch_ms": stock.ms(), "ours_ms": series[call].ms(), "call": call,
        "ratio": ratios[call], "relative": over(series[call], stock), "ratios": ratios,
        "processor_ratios": {name: _by_processor(stock, series[name]) for name in ratios},
        "calls_per_block": series[call].calls,
    }  # fmt: skip


def _by_processor(stock: Series, mine: Series) -> float:
    both = zip(stock.processor, mine.processor, strict=True)
    return float(f"{statistics.median(a / max(b, 1e-12) for a, b in both):.4g}")


def _told(selection: Any) -> Row:
    return {
        "chosen": selection.backend,
        "chosen_by": str(selection.source),
        "reason": selection.reason,
    }


def judged(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what all rows say together. `goals_met` is None where it cannot be said."""
    slower = [row for row in rows if row["ratio"]["median"] < LEAST]
    loud = [row["name"] for row in slower if row["foreign"]["median"] > LOUD]
    harmed = [row["name"] for row in slower if row["name"] not in loud]
    wrong = [row["name"] for row in rows if row["wrong"]]
    faster = [row["native_ratio"] for row in rows if row["native_ratio"]]
    worst = min(rows, key=lambda row: row["ratio"]["median"])
    return {
        "least": LEAST, "harmed": harmed, "too_loud": loud, "wrong": wrong,
        "worst": {"name": worst["name"], "ratio": worst["ratio"]["median"]},
        "mean_ratio": _mean([row["ratio"]["median"] for row in rows]),
        "native_mean_ratio": _mean([ratio["median"] for ratio in faster]),
        "goals_met": False if harmed or wrong else None if loud else True,
    }  # fmt: skip


def _mean(ratios: Sequence[float]) -> float | None:
    """Return the geometric mean."""
    return round(math.exp(statistics.fmean(map(math.log, ratios))), 3) if ratios else None
