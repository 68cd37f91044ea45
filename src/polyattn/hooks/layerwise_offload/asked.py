"""What a user asks of an offload, checked before anything is looked at or moved."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.offload_plan import Facts, OffloadPlan
from polyattn.hooks.layerwise_offload.planning import make_plan
from polyattn.hooks.layerwise_offload.sizes import read_bytes, said

_GAPS = 64 << 10
"""By how much a checkpoint's sizes are others than a model's: small buffers, and alignment."""

__all__ = ["Asked", "asked_for", "checked_paths", "checked_resident", "checked_units"]


class Asked:
    """What is asked of the plan: one that is given, or a budget and a depth."""

    def __init__(self, plan: OffloadPlan | None, budget: int | None, depth: int | None) -> None:
        self.plan, self.budget, self.depth = plan, budget, depth
        self.beside_held = False

    def read_budget(self, held: int) -> None:
        """Take a budget below what the process holds without the model for the model's alone."""
        self.beside_held = self.budget is not None and self.budget < held

    def limit(self, facts: Facts) -> int | None:
        """Return how much the process may hold on the device, the model and all else."""
        if self.budget is None:
            return None
        return self.budget + (facts.other_bytes if self.beside_held else 0)

    def plan_for(self, facts: Facts, device: str, tier: str) -> OffloadPlan:
        """Return the plan that was given, if it is for this, or the one that is best."""
        if self.plan is not None:
            _check_plan(self.plan, facts, device, tier)
            return self.plan
        budget = self.budget
        if budget is None:  # as few as possible
            largest = max((nbytes for _, nbytes in facts.units), default=0)
            fixed = facts.outside_bytes + facts.other_bytes + facts.activation_bytes
            budget = fixed + ((self.depth or 1) + 1) * largest
        if not self.beside_held:
            return make_plan(facts, device=device, budget=budget, tier=tier, depth=self.depth)
        plan = make_plan(
            replace(facts, other_bytes=0), device=device, budget=budget, tier=tier,
            depth=self.depth,
        )  # fmt: skip
        return replace(
            plan,
            other_bytes=facts.other_bytes,
            peak_bytes=plan.peak_bytes + facts.other_bytes,
            beside_held=True,
        )


def asked_for(plan: Any, budget: Any, depth: Any) -> Asked:
    """Check what is asked of the plan, and read it from its file."""
    if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 1):
        raise OffloadError(
            f"got depth={depth!r}, expected how many units to fetch ahead: 1, 2, ..."
        )
    if plan is None:
        return Asked(None, None if budget is None else read_bytes(budget), depth)
    if budget is not None or depth is not None:
        other = f"budget={budget!r}" if budget is not None else f"depth={depth!r}"
        raise OffloadError(
            f"got {other} beside plan=, which has its own, expected one of the two: leave it out, "
            "or make a plan with it"
        )
    if not isinstance(plan, OffloadPlan | str | os.PathLike):
        raise OffloadError(
            f"got plan={plan!r}, expected an OffloadPlan (handle.plan, make_plan) or its file"
        )
    return Asked(
        plan if isinstance(plan, OffloadPlan) else OffloadPlan.load(Path(plan)), None, None
    )


def checked_paths(disk: Any, weights: Any) -> None:
    """Raise unless `disk` is a folder's path and `weights` one or more paths."""
    if disk is not None and (not isinstance(disk, str | os.PathLike) or not os.fspath(disk)):
        raise OffloadError(f"got disk={disk!r}, expected the path of a folder for the weights")
    if weights is None:
        return
    each = weights if isinstance(weights, list | tuple) else [weights]
    if not each or not all(isinstance(path, str | Path | os.PathLike) and path for path in each):
        raise OffloadError(
            f"got weights={weights!r}, expected the path of a safetensors file or of a folder of "
            "them, or a list of such"
        )


def checked_units(units: Any) -> list[str] | None:
    """Return the patterns of units; raises for what is no regular expression."""
    if units is None:
        return None
    each = [units] if isinstance(units, str) else units
    if not isinstance(each, Sequence) or not each or not all(isinstance(one, str) for one in each):
        raise OffloadError(
            f"got units={units!r}, expected a regular expression of modules' names, or a list"
        )
    for pattern in each:
        try:
            re.compile(pattern)
        except re.error as error:
            raise OffloadError(
                f"got units={pattern!r}, which is no regular expression ({error}), expected one "
                r"of modules' names, such as 'layers\.\d+'"
            ) from error
    return list(each)


def checked_resident(resident: Any, model: nn.Module) -> list[nn.Module]:
    """Return the modules that are to stay; raises for what is none of the model."""
    each = [resident] if isinstance(resident, nn.Module) else resident
    if not isinstance(each, list | tuple | set | frozenset | nn.ModuleList):
        raise OffloadError(f"got resident={resident!r}, expected modules of the model")
    known = {id(module) for module in model.modules()}
    for module in each:
        if not isinstance(module, nn.Module) or id(module) not in known:
            what = type(module).__name__ if isinstance(module, nn.Module) else repr(module)
            raise OffloadError(
                f"got {what} in resident=, expected modules of the model, such as [model.head]"
            )
    return list(each)


def _check_plan(plan: OffloadPlan, facts: Facts, device: str, tier: str) -> None:
    """Raise unless a plan is for these units, this device, and where the weights will live."""
    units = dict(facts.units)
    planned = {unit.name: unit for unit in plan.units}
    if planned.keys() != units.keys():
        other = min(planned.keys() ^ units.keys())
        raise OffloadError(
            f"got a plan for {len(planned)} units ({_some(planned)}), expected one for the "
            f"{len(units)} of this model ({_some(units)}); {other!r} is in one of the two: plan "
            "for this model, or name the plan's units in units="
        )
    if plan.device.partition(":")[0] != device.partition(":")[0]:
        raise OffloadError(
            f"got a plan for {plan.device}, expected one for {device}, where the model computes: "
            "name the plan's device in device=, or plan anew"
        )
    for unit in plan.units:
        if abs(unit.nbytes - units[unit.name]) > max(_GAPS, units[unit.name] // 50):
            raise OffloadError(
                f"got a plan in which {unit.name} has {said(unit.nbytes)}, expected "
                f"{said(units[unit.name])} as in this model: plan anew for its dtype and sizes"
            )
        if unit.tier not in ("resident", tier):
            raise OffloadError(
                f"got a plan in which {unit.name} streams from the {unit.tier}, expected the "
                f"{tier}: {'give' if unit.tier == 'disk' else 'leave out'} disk= or weights=, or "
                "plan anew"
            )


def _some(names: Any) -> str:
    return ", ".join(list(names)[:2]) + (", ..." if len(names) > 2 else "")
