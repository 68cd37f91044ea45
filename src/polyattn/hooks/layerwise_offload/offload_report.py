"""What came of a plan: of each unit its copies, waits and computation, beside the prediction."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.exact_memory import locked_bytes
from polyattn.hooks.layerwise_offload.meter import Event
from polyattn.hooks.layerwise_offload.plan_check import UNREADABLE
from polyattn.hooks.layerwise_offload.process_memory import peak
from polyattn.hooks.layerwise_offload.sizes import said

if TYPE_CHECKING:
    from polyattn.hooks.layerwise_offload.engine import Engine
    from polyattn.hooks.layerwise_offload.offload_plan import OffloadPlan

__all__ = ["SCHEMA", "OffloadReport", "UnitRow", "report_of"]

SCHEMA = "polyattn.offload.report/2"
_MOST = float(1 << 62)


@dataclass(frozen=True)
class UnitRow:
    """One unit: where it lives, how often it was used and brought, the seconds of all its uses."""

    index: int
    name: str
    nbytes: int
    tier: str
    uses: int
    fetches: int
    misses: int
    copy_s: float
    stall_s: float
    compute_s: float

    @property
    def rate(self) -> float | None:
        """Bytes a second of its copies."""
        return self.fetches * self.nbytes / self.copy_s if self.copy_s else None


@dataclass(frozen=True)
class OffloadReport:
    """What was measured since offload began, or its plan was last changed.

    `pass_s`: a pass on average. `bound_s`: the longer of a pass's computation and its copies.
    `slots_added`: for units within units or of several threads; `slots_given_up`: to whoever kept a
    view of a weight. `outside`: loads outside any call of the model, which nothing foresees.

    >>> import tempfile, torch
    >>> from polyattn.hooks import offload
    >>> from polyattn.hooks.layerwise_offload import OffloadReport
    >>> blocks = [torch.nn.Linear(64, 64) for _ in range(4)]
    >>> model = torch.nn.Sequential(*blocks).eval().requires_grad_(False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with offload(model, device="cpu", disk=folder) as handle:
    ...         _ = model(torch.ones(1, 64))
    ...         report = handle.report()
    >>> report.units[0].uses, OffloadReport.from_json(report.to_json()) == report
    (1, True)
    """

    units: tuple[UnitRow, ...]
    passes: int
    pass_s: float | None
    predicted_s: float | None
    compute_s: float
    copy_s: float
    peak_bytes: int
    planned_peak_bytes: int
    locked_bytes: int
    slot_bytes: int
    slots_added: int
    slots_given_up: int
    bytes_written_back: int
    outside: int
    events: tuple[Event, ...] = ()

    @property
    def bound_s(self) -> float:
        """What no order of copies and computation beats."""
        return max(self.compute_s, self.copy_s)

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> OffloadReport:
        """Read a report; anything else is an :class:`~polyattn.errors.OffloadError`."""
        try:
            data = json.loads(text)
            if data.pop("schema") != SCHEMA:
                raise ValueError("another schema")
            data["units"] = tuple(UnitRow(**row) for row in data["units"])
            data["events"] = tuple(Event(**event) for event in data["events"])
            report = cls(**data)
            _check(report)
            str(report)  # what cannot be printed is none
        except UNREADABLE as error:
            raise OffloadError(
                f"got what is no report of this version ({error}), expected one of {SCHEMA!r}: "
                "save it again with handle.report().save(path)"
            ) from error
        return report

    def save(self, path: str | Path) -> None:
        """Write the report as a JSON file, which `polyattn offload show` reads."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> OffloadReport:
        """Read a report from a JSON file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise OffloadError(f"got the report {path}, which cannot be read ({error})") from error

    def __str__(self) -> str:
        if not self.units:
            return "nothing streams"
        lines = [_verdict(self)]
        width = max(len(row.name) for row in self.units)
        head = ("from", "uses", "misses", "copy", "wait", "compute", "GB/s")
        lines.append(f"  {'unit':<{width}}  {'size':>9}" + "".join(f"{h:>10}" for h in head))
        lines += [_line(row, width) for row in self.units]
        lines.append(
            f"  peak {said(self.peak_bytes)} (planned {said(self.planned_peak_bytes)}), "
            f"slots {said(self.slot_bytes)}, locked {said(self.locked_bytes)}"
        )
        notes = (
            (self.slots_added, "slots were added for units within units or other threads"),
            (self.slots_given_up, "slots were given up to who kept a view of a weight"),
            (self.bytes_written_back, "bytes of changed weights were brought home"),
            (self.outside, "loads came outside any call of the model: nothing foresaw them"),
        )
        lines += [f"  {count:,} {text}" for count, text in notes if count]
        return "\n".join(lines)


def _check(report: OffloadReport) -> None:
    """Raise ValueError for a value of another kind than the field's: pages compute with them."""
    rows: tuple[OffloadReport | UnitRow | Event, ...] = (report, *report.units, *report.events)
    for row in rows:
        for field in fields(row):
            value, kind = getattr(row, field.name), str(field.type)
            least = -1 if field.name == "unit" else 0  # -1: what is outside of any
            number = type(value) in (int, float) and least <= value < _MOST
            whole = type(value) is int and number
            optional = value is None and kind.endswith("None")
            fits = {"int": whole, "float": number, "str": type(value) is str}
            if not optional and not fits.get(kind.removesuffix(" | None"), True):
                raise ValueError(f"{field.name}: {value!r:.60}")
            if type(value) is str:
                value.encode()  # half a pair of characters is in no page


def _verdict(report: OffloadReport) -> str:
    if not report.passes or report.pass_s is None:
        return "no pass was measured yet"
    text = f"{report.passes} passes of {report.pass_s:.4g} s"
    if report.predicted_s:
        text += f" (predicted {report.predicted_s:.4g})"
    if report.bound_s:
        text += f", {report.pass_s / report.bound_s:.2f} x the bound of max(compute, copy)"
    return text


def _line(row: UnitRow, width: int) -> str:
    uses = max(row.uses, 1)
    fetches = max(row.fetches, 1)
    times = (row.copy_s / fetches, row.stall_s / uses, row.compute_s / uses)
    rate = "-" if row.rate is None else f"{row.rate / 1e9:.2f}"
    return (
        f"  {row.name:<{width}}  {said(row.nbytes):>9}{row.tier:>10}{row.uses:>10}{row.misses:>10}"
        + "".join(f"{1e3 * seconds:>7.2f} ms" for seconds in times)
        + f"{rate:>10}"
    )


def report_of(plan: OffloadPlan, engine: Engine | None) -> OffloadReport:
    """Gather what an engine has measured."""
    if engine is None:
        return OffloadReport(
            (), 0, None, plan.pass_s, 0.0, 0.0, 0, plan.peak_bytes, locked_bytes(), 0, 0, 0, 0, 0
        )
    meter = engine.meter
    meter.resolve()
    rows = tuple(
        UnitRow(
            unit.index, unit.name, unit.nbytes, unit.home.tier, times.uses, times.fetches,
            times.misses, times.copy_s, times.stall_s, times.compute_s,
        )
        for unit in engine.units.values()
        for times in [meter.units[unit.index]]
    )  # fmt: skip
    passes = max(meter.passes, 1)
    stalls = sum(row.stall_s for row in rows)
    return OffloadReport(
        rows,
        meter.passes,
        meter.pass_s / meter.passes if meter.passes else None,
        plan.pass_s,
        max(meter.pass_s - stalls, 0.0) / passes,
        sum(row.copy_s for row in rows) / passes,
        peak(engine.carrier.device),
        plan.peak_bytes,
        locked_bytes(),
        sum(slot.memory.numel() for slot in engine.slots),
        meter.slots_added,
        meter.slots_given_up,
        meter.bytes_written_back,
        meter.outside,
        tuple(meter.events),
    )
