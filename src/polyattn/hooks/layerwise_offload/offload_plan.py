"""The plan: which units stay, which stream and from where, and what will come of it.

It is a value, made by :func:`~polyattn.hooks.layerwise_offload.planning.make_plan`, printed, stored
as JSON, and changed by whoever knows better.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.plan_check import UNREADABLE, check_plan
from polyattn.hooks.layerwise_offload.sizes import said

__all__ = ["SCHEMA", "Facts", "OffloadPlan", "PlannedUnit"]

SCHEMA = "polyattn.offload.plan/1"


@dataclass(frozen=True)
class Facts:
    """What is known of a model and a machine.

    `units`: name and bytes of each, in the order in which they are used. `outside_bytes`: weights
    that are in no unit; they stay. `other_bytes`: what the process holds on the device beside the
    weights, and `activation_bytes` what a pass needs on top. `compute_s`: of each unit in a pass;
    empty: not measured. `outside_s`: of a pass outside the units. `rates`: bytes a second from
    the ``host`` and the ``disk``; a tier that is missing was not measured. `interference`: by how
    many seconds a second of copying holds up the computation beside it. `staying`: units that stay
    in any case. `readers`: threads that read from a disk; 0: as many as is usual.

    >>> from polyattn.hooks.layerwise_offload import Facts
    >>> Facts([("blocks.0", 400), ("blocks.1", 400)], rates={"host": 25e9}).outside_bytes
    0
    """

    units: Sequence[tuple[str, int]]
    outside_bytes: int = 0
    other_bytes: int = 0
    activation_bytes: int = 0
    compute_s: Sequence[float] = ()
    outside_s: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict)
    order: Sequence[int] = ()
    latency_s: float = 0.0
    interference: float = 0.0
    staying: Sequence[str] = ()
    readers: int = 0


@dataclass(frozen=True)
class PlannedUnit:
    """A unit of the plan. `tier`: ``resident``, ``host`` or ``disk``.

    >>> from polyattn.hooks.layerwise_offload import PlannedUnit
    >>> PlannedUnit("blocks.0", 400, "host").copy_s is None
    True
    """

    name: str
    nbytes: int
    tier: str
    compute_s: float | None = None
    copy_s: float | None = None


@dataclass(frozen=True)
class OffloadPlan:
    """What stays, what streams, and what that costs; a value, JSON and back.

    `peak_bytes`: the most that the process will hold on the device. `beside_held`: the budget was
    less than the process holds without the model, and so is the model's alone. `pass_s`,
    `slowdown`: of one pass, None where the computation was not measured. `bound_s`: the longer of
    computation and copies, which nothing beats. `readers`: threads that read from a disk, 0 where
    that was not measured.

    >>> from polyattn.hooks.layerwise_offload import Facts, OffloadPlan, make_plan
    >>> facts = Facts([("a", 100), ("b", 100), ("c", 100)])
    >>> plan = make_plan(facts, device="cuda", budget=250, tier="host", depth=1)
    >>> plan.streamed, plan.resident, OffloadPlan.from_json(plan.to_json()) == plan
    (('a', 'b', 'c'), (), True)
    """

    device: str
    budget_bytes: int | None
    depth: int
    units: tuple[PlannedUnit, ...]
    outside_bytes: int
    other_bytes: int
    activation_bytes: int
    peak_bytes: int
    rates: dict[str, float] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    compute_s: float | None = None
    copy_s: float | None = None
    pass_s: float | None = None
    beside_held: bool = False
    readers: int = 0

    @property
    def resident(self) -> tuple[str, ...]:
        """The names of the units that stay on the device."""
        return tuple(unit.name for unit in self.units if unit.tier == "resident")

    @property
    def streamed(self) -> tuple[str, ...]:
        """The names of the units that are brought for each use."""
        return tuple(unit.name for unit in self.units if unit.tier != "resident")

    @property
    def slot_bytes(self) -> int:
        """How large a slot is: as the largest unit that streams."""
        return max((unit.nbytes for unit in self.units if unit.tier != "resident"), default=0)

    @property
    def weight_bytes(self) -> int:
        """Weights on the device at the most: what stays, and the slots."""
        stays = sum(unit.nbytes for unit in self.units if unit.tier == "resident")
        slots = (self.depth + 1) * self.slot_bytes if self.streamed else 0
        return stays + slots + self.outside_bytes

    @property
    def bound_s(self) -> float | None:
        """The longer of computation and copies."""
        known = [x for x in (self.compute_s, self.copy_s) if x is not None]
        return max(known) if len(known) == 2 else None

    @property
    def slowdown(self) -> float | None:
        """A pass over one in which everything were resident."""
        return self.pass_s / self.compute_s if self.pass_s and self.compute_s else None

    def with_homes(self, tiers: Mapping[str, str]) -> OffloadPlan:
        """Return the plan with units that stream from elsewhere now, by their names.

        >>> from polyattn.hooks.layerwise_offload import Facts, make_plan
        >>> facts = Facts([("a", 100), ("b", 100), ("c", 100)])
        >>> plan = make_plan(facts, device="cpu", budget=250, tier="disk", depth=1)
        >>> moved = plan.with_homes({"a": "host", "b": "disk"})
        >>> moved.units[0].tier, moved.peak_bytes - plan.peak_bytes
        ('host', 100)
        """
        units = tuple(
            replace(unit, tier=tiers.get(unit.name, unit.tier)) if unit.tier != "resident" else unit
            for unit in self.units
        )
        if units == self.units:
            return self
        pairs = zip(units, self.units, strict=True)
        to_host = sum(new.nbytes for new, old in pairs if (new.tier, old.tier) == ("host", "disk"))
        more = to_host if self.device.startswith("cpu") else 0
        return replace(self, units=units, peak_bytes=self.peak_bytes + more)

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> OffloadPlan:
        """Read a plan; anything else is an :class:`OffloadError`."""
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise ValueError(f"its schema is {data['schema']!r}")
            del data["schema"]
            if not isinstance(data["units"], list) or not isinstance(data["order"], list):
                raise ValueError("its units and order are no lists")
            data["units"] = tuple(PlannedUnit(**unit) for unit in data["units"])
            data["order"] = tuple(data["order"])
            plan = cls(**data)
            check_plan(plan)
        except UNREADABLE as error:
            raise OffloadError(
                f"got what is no plan of this version ({error}), expected one of {SCHEMA!r}: "
                "make it again with `polyattn offload plan`"
            ) from error
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan as a JSON file."""
        try:
            Path(path).write_text(self.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise OffloadError(
                f"got {path} for the plan, which cannot be written ({error.strerror}), expected a "
                "file in a folder that there is"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> OffloadPlan:
        """Read a plan from a JSON file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise OffloadError(f"got the plan {path}, which cannot be read ({error})") from error

    def __str__(self) -> str:
        return _text_of(self)


def _text_of(plan: OffloadPlan) -> str:
    """Return the plan as text: the verdict first, then what is where."""
    lines = [_verdict(plan)]
    rows = [
        ("weights outside the units", plan.outside_bytes),
        (f"{len(plan.resident)} resident units", sum(_sizes(plan, "resident"))),
    ]
    if plan.streamed:
        rows.append((f"{plan.depth + 1} slots", (plan.depth + 1) * plan.slot_bytes))
    rows += [
        ("activations", plan.activation_bytes),
        ("held by the process already", plan.other_bytes),
        ("peak", plan.peak_bytes),
    ]
    if plan.budget_bytes is not None:
        label = "budget, beside what is held" if plan.beside_held else "budget"
        rows.append((label, plan.budget_bytes))
    lines += [f"  {name:<30}{said(nbytes):>12}" for name, nbytes in rows]
    if plan.streamed:
        lines += ["", *_units(plan)]
    return "\n".join(lines)


def _sizes(plan: OffloadPlan, tier: str) -> list[int]:
    return [unit.nbytes for unit in plan.units if unit.tier == tier]


def _verdict(plan: OffloadPlan) -> str:
    if not plan.streamed:
        return f"everything fits on {plan.device}: nothing is moved"
    moved = sum(unit.nbytes for unit in plan.units if unit.tier != "resident")
    tiers = sorted({unit.tier for unit in plan.units} - {"resident"})
    by = f" by {plan.readers} threads" if plan.readers > 1 else ""
    text = (
        f"{len(plan.streamed)} of {len(plan.units)} units stream from {' and '.join(tiers)}{by} to "
        f"{plan.device}, {said(moved)} a pass"
    )
    if plan.slowdown is None or plan.bound_s is None or plan.pass_s is None:
        return f"{text}; its time is not known: give sample= to measure it"
    return (
        f"{text}: {plan.pass_s:.3g} s, {plan.slowdown:.2f} x all resident, "
        f"{plan.pass_s / plan.bound_s:.2f} x the bound of max(compute, copy)"
    )


def _units(plan: OffloadPlan) -> list[str]:
    """Return a line for each unit; neighbours that differ in their names alone share one."""
    groups: list[list[PlannedUnit]] = []
    for unit in plan.units:
        if groups and _row(groups[-1][0], "") == _row(unit, ""):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    names = [
        group[0].name if len(group) == 1 else f"{group[0].name} .. {group[-1].name}"
        for group in groups
    ]
    width = max(map(len, names))
    lines = [f"  {'unit':<{width}}  {'size':>10}  {'where':<8}  {'compute':>9}  {'copy':>9}"]
    pairs = zip(groups, names, strict=True)
    return lines + [_row(group[0], f"{name:<{width}}") for group, name in pairs]


def _row(unit: PlannedUnit, name: str) -> str:
    times = [f"{x * 1e3:.2f} ms" if x is not None else "-" for x in (unit.compute_s, unit.copy_s)]
    return f"  {name}  {said(unit.nbytes):>10}  {unit.tier:<8}  {times[0]:>9}  {times[1]:>9}"
