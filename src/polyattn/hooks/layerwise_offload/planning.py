"""Makes plans: a pure function of bytes, seconds, rates and a budget.

It fills the memory that is free, streams only the rest, evenly spread, and predicts peak and time.
"""

from __future__ import annotations

import math
from dataclasses import replace

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.offload_plan import Facts, OffloadPlan, PlannedUnit
from polyattn.hooks.layerwise_offload.predict import Prediction, Step, predict
from polyattn.hooks.layerwise_offload.sizes import said

__all__ = ["make_plan"]

_DEPTHS = (1, 2, 3)


def make_plan(
    facts: Facts, *, device: str, budget: int | None, tier: str, depth: int | None = None
) -> OffloadPlan:
    """Return the plan that is fastest within the budget, in bytes of the device's memory.

    `tier`: where streamed units live. `depth`: how many units are fetched ahead; None: the best.
    Raises :class:`OffloadError` if not even streaming every unit fits.

    >>> facts = Facts([(f"blocks.{i}", 100) for i in range(6)], outside_bytes=50)
    >>> plan = make_plan(facts, device="cuda", budget=450, tier="host", depth=1)
    >>> plan.streamed, plan.peak_bytes
    (('blocks.1', 'blocks.2', 'blocks.4', 'blocks.5'), 450)
    """
    fixed = facts.outside_bytes + facts.other_bytes + facts.activation_bytes
    total = sum(nbytes for _, nbytes in facts.units)
    if budget is None or fixed + total <= budget:
        return _planned(facts, device, budget, tier, depth or 1, frozenset())
    found = []
    for ahead in (depth,) if depth is not None else _DEPTHS:
        streamed = _fewest_streamed(facts, budget - fixed, ahead)
        if streamed is not None:
            found.append(_planned(facts, device, budget, tier, ahead, streamed))
    if not found:
        largest = max(nbytes for _, nbytes in facts.units)
        ahead = 1 if depth is None else depth
        least = fixed + (ahead + 1) * largest
        raise OffloadError(
            f"got a budget of {said(budget)}, expected at least {said(least)}: "
            f"{said(facts.outside_bytes)} of weights outside the units, {said(facts.other_bytes)} "
            f"that the process holds already, {said(facts.activation_bytes)} for activations, and "
            f"{ahead + 1} slots of {said(largest)}. Cut finer (units=...), or give more"
        )
    return min(found, key=lambda plan: (plan.pass_s or math.inf, len(plan.streamed), plan.depth))


def _fewest_streamed(facts: Facts, free: int, depth: int) -> frozenset[int] | None:
    """Return the units to stream: as few as fit, spread evenly, the first one last to go."""
    staying = set(facts.staying)
    movable = [index for index, (name, _) in enumerate(facts.units) if name not in staying]
    sizes, count = [nbytes for _, nbytes in facts.units], len(movable)
    total = sum(sizes)
    for streamed in range(1, count + 1):
        places = (-(-(place + 1) * count // streamed) - 1 for place in range(streamed))
        chosen = frozenset(movable[place] for place in places)
        moved = [sizes[index] for index in chosen]
        slots = min(depth + 1, streamed) * max(moved)
        if total - sum(moved) + slots <= free and (streamed > depth or streamed == count):
            return chosen
    return None


def _planned(
    facts: Facts, device: str, budget: int | None, tier: str, depth: int, streamed: frozenset[int]
) -> OffloadPlan:
    rate = facts.rates.get(tier)
    units = tuple(
        PlannedUnit(
            name,
            nbytes,
            tier if index in streamed else "resident",
            facts.compute_s[index] if facts.compute_s else None,
            facts.latency_s + nbytes / rate if rate and index in streamed else None,
        )
        for index, (name, nbytes) in enumerate(facts.units)
    )
    plan = OffloadPlan(
        device, budget, depth, units, facts.outside_bytes, facts.other_bytes,
        facts.activation_bytes, 0, dict(facts.rates), tuple(facts.order), readers=facts.readers,
    )  # fmt: skip
    peak = plan.weight_bytes + facts.other_bytes + facts.activation_bytes
    plan = replace(plan, peak_bytes=peak)
    expected = _expected(facts, plan)
    if expected is None:
        return plan
    return replace(
        plan, compute_s=expected.compute_s, copy_s=expected.copy_s, pass_s=expected.pass_s
    )


def _expected(facts: Facts, plan: OffloadPlan) -> Prediction | None:
    if not facts.compute_s or any(u.copy_s is None for u in plan.units if u.tier != "resident"):
        return None
    order = facts.order or range(len(plan.units))
    uses = [sum(1 for other in order if other == index) for index in range(len(plan.units))]
    copies = [unit.copy_s or 0.0 for unit in plan.units]
    alone = [(unit.compute_s or 0.0) / max(uses[i], 1) for i, unit in enumerate(plan.units)]
    met = [Step(alone[i] + facts.interference * copies[i], copies[i]) for i in order]
    found = predict(met, plan.depth, facts.outside_s)
    bare = sum(alone[i] for i in order) + facts.outside_s
    return replace(found, compute_s=bare)
