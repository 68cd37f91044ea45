"""Follows a plan: measures once weights are away, plans with that, and sees what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.asked import Asked
from polyattn.hooks.layerwise_offload.attach import Attached
from polyattn.hooks.layerwise_offload.handle import LayerwiseOffload
from polyattn.hooks.layerwise_offload.measure_pass import confirmed, kept_bytes, measured, runner
from polyattn.hooks.layerwise_offload.offload_plan import Facts, OffloadPlan
from polyattn.hooks.layerwise_offload.process_memory import held, trim
from polyattn.hooks.layerwise_offload.survey import Survey

__all__ = ["facts_of", "settle"]

_TRIES = 4
_MARGIN = 4 << 20
"""What is left free of a budget, at least: a peak differs by it from run to run."""


def facts_of(survey: Survey, other: int) -> Facts:
    """Return what is known of a model before it is measured; `other`: held beside its weights."""
    return Facts(
        [(found.name, found.nbytes) for found in survey.units],
        outside_bytes=survey.outside_bytes,
        other_bytes=other,
    )


def settle(
    handle: LayerwiseOffload, attached: Attached, survey: Survey, asked: Asked, sample: Any
) -> None:
    """Measure what can be measured now that the weights are away, and follow the plan of that."""
    device, tier = attached.carrier.device, attached.homes.tier
    trim()
    facts = facts_of(survey, other=max(0, held(device) - survey.outside_bytes))
    model = attached.model()
    if sample is None or asked.plan is not None or model is None:
        handle.start(asked.plan_for(facts, str(device), tier))
        return
    run = runner(model, sample)
    handle.start(Asked(None, None, 1).plan_for(facts, str(device), tier))
    if not handle.units:  # as few as two, which the slots hold: nothing is to be measured
        handle.start(asked.plan_for(facts, str(device), tier))
        return
    facts = handle.measure(lambda engine: measured(engine, run, facts, tier))
    _come_true(handle, asked, facts, run, device, tier)


def _come_true(
    handle: LayerwiseOffload, asked: Asked, facts: Facts, run: Callable[[], Any],
    device: torch.device, tier: str,
) -> None:  # fmt: skip
    """Follow the plan; where it holds more than it may, follow one that holds less."""
    limit, kept = asked.limit(facts), kept_bytes(device)
    free = max(_MARGIN, kept // 2)  # later passes hold a little more than the first
    for _ in range(_TRIES):
        plan = _planned(asked, facts, device, tier)
        trim()
        handle.start(plan)
        if not plan.streamed:
            return
        seconds, most = handle.measure(lambda engine: confirmed(engine, run))
        over = 0 if limit is None or most is None else most + free - limit
        if over <= 0:
            handle.expect(_as_seen(plan, seconds, most, kept))
            return
        facts = replace(facts, activation_bytes=facts.activation_bytes + over)
    raise OffloadError(
        f"got a budget of {limit} bytes that {_TRIES} plans passed, the last by {over} bytes, "
        "expected one that holds what a call takes beside the weights: give more"
    )


def _planned(asked: Asked, facts: Facts, device: torch.device, tier: str) -> OffloadPlan:
    """Return the plan; units that no call has reached stay if they may: others may read them."""
    called = set(facts.order)
    staying = [name for index, (name, _) in enumerate(facts.units) if index not in called]
    if called and staying:
        try:
            return asked.plan_for(replace(facts, staying=staying), str(device), tier)
        except OffloadError:
            pass  # as many as fit in no case, such as experts that were not routed to
    return asked.plan_for(facts, str(device), tier)


def _as_seen(plan: OffloadPlan, seconds: float, most: int | None, kept: int) -> OffloadPlan:
    """Return a plan with the time that a pass took, and with its peak: `kept` may yet be added."""
    peak = plan.peak_bytes if most is None else max(most, min(plan.peak_bytes, most + kept))
    more = max(peak - plan.peak_bytes, -plan.activation_bytes)
    return replace(
        plan,
        pass_s=seconds or plan.pass_s,
        activation_bytes=plan.activation_bytes + more,
        peak_bytes=plan.peak_bytes + more,
    )
