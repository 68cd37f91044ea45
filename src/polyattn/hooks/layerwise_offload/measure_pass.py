"""Measures a model under offload: what each unit computes, what copies bring, what a pass needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.engine import Engine
from polyattn.hooks.layerwise_offload.meter import Meter
from polyattn.hooks.layerwise_offload.offload_plan import Facts
from polyattn.hooks.layerwise_offload.predict import Step, predict
from polyattn.hooks.layerwise_offload.process_memory import begin_peak, held, peak

__all__ = ["confirmed", "kept_bytes", "measured", "runner"]

_MOST_PASSES, _LONG_S = 5, 2.0
_CLEARLY = 0.97  # times of passes differ by less from run to run
_KEPT = 32 << 20


def kept_bytes(device: torch.device) -> int:
    """Return by how much the memory that a peak holds beyond what is in use differs between runs.

    On the processor the C library keeps some of what is freed, on a device torch counts its own.
    """
    return _KEPT if device.type == "cpu" else 0


def runner(model: nn.Module, sample: Any) -> Callable[[], Any]:
    """Return a call of the model from what a user gave as its example.

    A callable is called as it is; a dict is keywords, a tuple positional arguments, and anything
    else the only one.
    """
    if sample is model or isinstance(sample, nn.Module):
        raise OffloadError("got a module as sample, expected inputs or a function that calls it")
    if callable(sample):
        return lambda: sample()
    if isinstance(sample, Mapping):
        return lambda: model(**sample)
    if isinstance(sample, tuple):
        return lambda: model(*sample)
    return lambda: model(sample)


def measured(engine: Engine, run: Callable[[], Any], facts: Facts, tier: str) -> Facts:
    """Run the model some times, and return the facts with what was seen.

    The first pass makes what is made once; in the next nothing is copied while anything is
    computed, which tells the two apart; then they meet. Short passes are repeated, and all of it
    is done for each number of threads that may read: the one by which a pass is shorter is kept.
    """
    device, ahead = engine.carrier.device, engine.depth
    engine.depth = 0
    slots = sum(slot.memory.numel() for slot in engine.slots)
    before = held(device) + (slots if device.type == "cpu" else 0)  # nobody touched them yet
    begin_peak(device)
    try:
        with torch.no_grad():
            run()  # what is made only once, is made now; and the order is learned
            together, alone = _fastest(
                _met(engine, run, replace(facts, readers=readers), tier)
                for readers in engine.carrier.readers or (0,)
            )
    finally:
        engine.depth = ahead
    activations = max(0, peak(device) - before) + kept_bytes(device)
    return replace(alone, activation_bytes=activations, interference=_interference(together, alone))


def _fastest(found: Iterable[tuple[float, Facts]]) -> tuple[float, Facts]:
    """Return the first, unless a later one is clearly shorter."""
    best, *others = found
    for each in others:
        best = each if each[0] < _CLEARLY * best[0] else best
    return best


def _met(engine: Engine, run: Callable[[], Any], facts: Facts, tier: str) -> tuple[float, Facts]:
    """Return the seconds of a pass with one unit ahead, and what one without any showed."""
    if facts.readers:
        engine.carrier.use_readers(facts.readers)
    engine.depth = 0
    alone = _middle(_repeated(engine.meter, run, lambda: _seen(engine, facts, tier)))[1]
    engine.depth = 1
    return _middle(_repeated(engine.meter, run, lambda: None))[0], alone


def confirmed(engine: Engine, run: Callable[[], Any]) -> tuple[float, int | None]:
    """Run the model as planned; return the seconds of a pass and the peak, if it is known."""
    device, meter = engine.carrier.device, engine.meter
    is_known = begin_peak(device)
    with torch.no_grad():
        run()  # where each unit finds its slot
        seconds = _middle(_repeated(meter, run, lambda: None))[0]
    return seconds, peak(device) if is_known else None


_Seen = TypeVar("_Seen")


def _repeated(
    meter: Meter, run: Callable[[], Any], look: Callable[[], _Seen]
) -> list[tuple[float, _Seen]]:
    """Run once, and again while that is quick; return each pass's seconds and what was seen."""
    found: list[tuple[float, _Seen]] = []
    while len(found) < _MOST_PASSES and sum(seconds for seconds, _ in found) < _LONG_S:
        meter.reset()
        run()
        meter.resolve()
        found.append((meter.pass_s, look()))
        if not meter.pass_s:
            break  # the sample never calls the model as a whole
    meter.reset()
    return found


def _middle(found: list[tuple[float, _Seen]]) -> tuple[float, _Seen]:
    return sorted(found, key=lambda each: each[0])[len(found) // 2]


def _seen(engine: Engine, facts: Facts, tier: str) -> Facts:
    """Return what a pass showed in which nothing was done at the same time."""
    meter = engine.meter
    compute = [meter.units[index].compute_s for index in range(len(facts.units))]
    copied = sum(times.copy_s for times in meter.units.values())
    stalled = sum(times.stall_s for times in meter.units.values())
    moved = sum(times.nbytes for times in meter.units.values())
    return replace(
        facts,
        compute_s=tuple(compute),
        outside_s=max(0.0, meter.pass_s - sum(compute) - stalled),
        order=tuple(engine.order.last()),
        rates={tier: moved / copied} if copied else {},
    )


def _interference(together_s: float, alone: Facts) -> float:
    """Return by how many seconds a second of copying holds up computation beside it, 0 to 1.

    On the processor both want the same cores and the same memory; on a device next to nothing. It
    is what makes the prediction of the pass in which they met what that pass took.
    """
    rate = next(iter(alone.rates.values()), 0.0)
    copies = [nbytes / rate if rate else 0.0 for _, nbytes in alone.units]
    order = alone.order or range(len(copies))

    def expected(share: float) -> float:
        steps = [Step(alone.compute_s[i] + share * copies[i], copies[i]) for i in order]
        return predict(steps, 1, alone.outside_s).pass_s

    low, high = 0.0, 1.0
    if together_s <= expected(low) or not any(copies):
        return low
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) < together_s else (low, middle)
    return high
