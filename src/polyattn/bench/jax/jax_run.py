"""One run of ``bench jax``: every case checked and timed, as a record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyattn.bench.cpu.bench_cpu import Options, in_force
from polyattn.bench.cpu.case_arrays import Inputs
from polyattn.bench.cpu.cases import Case
from polyattn.bench.cpu.repeats import Step as Timed
from polyattn.bench.cpu.repeats import load, once, over, time_steps
from polyattn.bench.cpu.truth import Truth
from polyattn.bench.cpu.ways import ours as torch_call
from polyattn.bench.cpu.ways import step as torch_step
from polyattn.bench.jax import choosing, footprint, tapping
from polyattn.bench.jax.jax_cases import LEAST, chosen
from polyattn.bench.jax.jax_ways import AUTOMATIC, JaxInputs, others, ours, step, stock, way
from polyattn.errors import PolyattnError
from polyattn.jax import explain

__all__ = ["BORDER", "measure"]

BORDER = 1.05
"""What the call may take under jit, over the same call from torch, where it takes a millisecond.

Shorter ones are told without a goal: what JAX and torch take to begin a call is not ours.
"""
_LONG_MS = 1.0
STOCK, TORCH, NATIVE = "jax.nn", "torch", "native_cpu"
_FAR = 12.0  # other backends that take so many times as long are not timed to the end
Row = dict[str, Any]


def measure(
    *, only: str, quick: bool, repeats: int, say: Callable[[str], None] = lambda line: None
) -> Row:
    """Time the cases and return the record; `say` hears what is being done."""
    cases = chosen(only, quick)
    block_s = 0.01 if quick else 0.04
    rows = []
    for case in cases:
        say(case.name)
        rows.append(timed(case, repeats, block_s))
    extra: Row = {"memory": [], "tracing": None, "taps": None}
    if not only:
        say("memory, tracing and taps")
        memory = footprint.rows(512 if quick else 4096)
        extra = {"memory": memory, "tracing": choosing.row(), "taps": tapping.row()}
    record = in_force("jax", Options(repeats=repeats, block_s=block_s, quick=quick))
    return {
        **record, **extra, "backend": AUTOMATIC, "rows": rows,
        "goals_met": None if quick else _met(rows, extra),
    }  # fmt: skip


def _met(rows: list[Row], extra: Row) -> bool:
    told = [extra[name] for name in ("tracing", "taps") if extra[name] is not None]
    return all(row["met"] and not row["wrong"] for row in rows) and all(row["met"] for row in told)


def timed(case: Case, repeats: int, block_s: float) -> Row:
    """Check and time one case."""
    inputs = Inputs.of(case)
    given, truth = JaxInputs(inputs), Truth(inputs)
    selection = explain(given.q, given.k, given.v, mask=given.mask)
    errors, wrong = truth.check(way(AUTOMATIC, ours(given)))
    steps = {AUTOMATIC: step(ours(given), given), STOCK: step(stock(case), given)}
    if selection.backend == NATIVE:
        steps[TORCH] = torch_step(torch_call(inputs, NATIVE), inputs)
    steps |= _near(given, selection.backend, once(steps[AUTOMATIC]))
    series, quiet = time_steps(steps, repeats=repeats, block_s=block_s)
    mine, theirs = series[AUTOMATIC], series[STOCK]
    ratio = over(theirs, mine)
    border = over(mine, series[TORCH]) if TORCH in series else None
    free = border is None or case.train or mine.ms()["median"] < _LONG_MS
    within = free or border["median"] <= BORDER  # type: ignore[index]
    return {
        **case.described(), "chosen": selection.backend, "reason": selection.reason,
        "ours_ms": mine.ms(), "stock_ms": theirs.ms(), "ratio": ratio,
        "relative": over(mine, theirs), "over_torch": border,
        "others_ms": {
            name: one.ms() for name, one in series.items() if name not in (AUTOMATIC, STOCK, TORCH)
        },
        "error": errors, "wrong": wrong, "met": ratio["median"] >= (case.goal or LEAST) and within,
        **load(quiet),
    }  # fmt: skip


def _near(given: JaxInputs, selected: str, own_s: float) -> dict[str, Timed]:
    """Return the other backends that are worth timing to the end."""
    found = {}
    for name in others(given, selected):
        try:
            one = step(ours(given, name), given)
        except PolyattnError:  # it runs, and does not train
            continue
        if once(one) <= _FAR * max(own_s, 1e-4):
            found[name] = one
    return found
