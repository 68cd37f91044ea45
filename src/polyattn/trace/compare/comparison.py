"""Comparing two traces: alignment, guards, weights, activations, and the verdict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polyattn.trace.compare import guards, parameters
from polyattn.trace.compare import rules as rules_
from polyattn.trace.compare.alignment import Alignment, align
from polyattn.trace.compare.blame import Walk
from polyattn.trace.compare.blamed_weight import blamed_weight, idle_notes
from polyattn.trace.compare.calibration import Floor, load
from polyattn.trace.compare.called import Called, Event
from polyattn.trace.compare.drift import drifts
from polyattn.trace.compare.frames import Frame
from polyattn.trace.compare.judge import judge
from polyattn.trace.compare.noise import noise_notes
from polyattn.trace.compare.outputs_compared import output_notes, outputs
from polyattn.trace.compare.side import Side
from polyattn.trace.compare.thresholds import Thresholds, Tolerance
from polyattn.trace.compare.unseen_keys import padding_notes
from polyattn.trace.compare.verdict import Coverage, Culprit, Guard, Verdict
from polyattn.trace.compare.verdict_rows import rows as rows_of
from polyattn.trace.format.contents import Trace
from polyattn.trace.format.reader import read

__all__ = ["compare"]

_GROWN = 8.0


def compare(
    a: Trace | str | Path,
    b: Trace | str | Path,
    *,
    rules: rules_.Given = None,
    floor: Floor | str | Path | None = None,
    tolerance: Tolerance = None,
    reruns: guards.Reruns = None,
    isolated: bool | None = None,
) -> Verdict:
    """Compare a port's trace `b` with the reference's trace `a`; name what deviates first.

    `rules`: which module is which where names and weights do not tell: a regular expression and
    its replacement each, as a mapping, pairs, or a JSON file of either. `floor`: calibrated, or its
    file. `tolerance`: relative errors that the user accepts: one, or by patterns of names.
    `reruns`: ``{"a": trace, "b": traces}`` of the same sides again, to see whether they repeat.
    `isolated`: whether each module of the port was fed the reference's inputs; by default as b's
    header says. Raises TraceError for what is no trace, rule, floor or tolerance.

    >>> import tempfile
    >>> from polyattn.trace import TraceWriter
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name, factor in (("a", 2.0), ("b", 2.1)):
    ...     with TraceWriter(folder / f"{name}.jsonl") as trace:
    ...         for module, value in (("up", [1.0, 2.0]), ("down", [factor, 3.0])):
    ...             _ = trace.add(module, "in", "args[0]", [1.0, 2.0])
    ...             _ = trace.add(module, "out", "out", value)
    >>> verdict = compare(folder / "a.jsonl", folder / "b.jsonl")
    >>> verdict.equal, verdict.culprit.module, verdict.culprit.kind, verdict.culprit.after
    (False, 'down', 'output', None)
    """
    run = _Comparison.of(a, b, rules)
    known = load(floor) if isinstance(floor, str | Path) else floor
    return run.verdict(known, tolerance, reruns, isolated)


@dataclass
class _Comparison:
    a: Side
    b: Side
    alignment: Alignment

    @classmethod
    def of(cls, a: Trace | str | Path, b: Trace | str | Path, rules: rules_.Given) -> _Comparison:
        parsed = rules_.parse(rules)
        one, other = (
            Side(given if isinstance(given, Trace) else read(given), name)
            for given, name in ((a, "reference"), (b, "port"))
        )
        return cls(one, other, align(one, other, parsed))

    def verdict(
        self,
        floor: Floor | None,
        tolerance: Tolerance,
        reruns: guards.Reruns,
        isolated: bool | None,
    ) -> Verdict:
        a, b = self.a, self.b
        if isolated is None:
            isolated = b.trace.header.selection.get("isolated") is True
        steady, own, unsteady = guards.repeats(a, b, self.alignment, reruns)
        thresholds = Thresholds(floor, tolerance, own)
        steps, common = guards.steps(a, b)
        replayed = any(record.forced for record in b.trace.records)
        drift = None if not isolated else drifts(b.frames, a.trace.records) if replayed else {}
        calls, _, _, notes = judge(self.alignment, thresholds, common, drift)
        walk = Walk(a, b, calls, outputs_only=isolated and not replayed)
        walk.run()
        weights = parameters.differences(a, b, self.alignment)
        counted = parameters.count(self.alignment)
        sure = walk.culprit if walk.start is None and not unsteady else None
        culprit = blamed_weight(weights, calls, walk) or sure
        if culprit is not None and culprit.kind != "parameter":
            others = _others(calls, walk, culprit) if not isolated else _further(walk, culprit)
            culprit = replace(culprit, others=others)
        perturbed = guards.perturbation(a, b)
        found = [
            guards.inputs(calls, walk.start, walk.unlike), perturbed,
            guards.weights(counted, weights), steady, steps, guards.dtypes(calls),
            guards.flags(a, b), guards.ended(a, b), outputs(a, b, calls),
        ]  # fmt: skip
        notes += [perturbed.said] if perturbed.holds and perturbed.said else []
        notes += [*idle_notes(weights, calls, walk), *padding_notes(calls, culprit)]
        blamed = walk.blamed if _activation(culprit) else None
        reasons = self._reasons(calls, walk, steps, found[-1], unsteady)
        return Verdict(
            equal=False if culprit is not None else None if reasons else True,
            culprit=culprit,
            rows=rows_of(a, b, calls, culprit, blamed, {(o.module, o.call) for o in walk.further}),
            guards={guard.name: guard for guard in found},
            coverage=self._coverage(calls, counted),
            notes=tuple(self._notes(notes, calls, walk, floor, thresholds, isolated)),
            reasons=tuple(reasons) if culprit is None else (),
            reference=_path(a.trace),
            port=_path(b.trace),
        )

    def _reasons(
        self,
        calls: Sequence[Called],
        walk: Walk,
        steps: Guard,
        outs: Guard,
        unsteady: Sequence[str],
    ) -> list[str]:
        """Why it cannot be said whether the two are the same."""
        found = []
        events = [event for call in calls for event in call.events()]
        if not calls:
            found.append(self._nothing_common(steps))
        elif not any(event.compared for event in events):
            found.append("no tensor of them could be compared: record sketch and l2 on both sides")
        if walk.start is not None:
            found.append(guards.inputs(calls, walk.start).said)
        for name in unsteady:
            found.append(
                f"the {name} does not repeat itself: switch off dropout, fix the seed, and ask for "
                "deterministic algorithms"
            )
        grey = [event for event in events if event.status == "cannot say"]
        if grey:
            found.append(_grey(grey))
        grown = [e for e in events if e.status == "grown" and e.worst and e.worst.ratio > _GROWN]
        if grown:
            found.append(
                f"errors grow above the threshold without any one module adding them (first in "
                f"{grown[0].call.b.module!r}): calibrate, or isolate"
            )
        lost = [e for e in events if any("NaN or infinite" in t.distance.why for t in e.tensors)]
        if any(not t.distance.comparable for e in lost for t in e.tensors):
            name = lost[0].call.a.module or "the model"
            found.append(
                f"the reference is NaN or infinite everywhere from {name!r} on: nothing is to be "
                "compared with there"
            )
        cut = guards.ended(self.a, self.b)
        found += [cut.said] if cut.holds is False else []
        lacking = outs.holds is False and any(event.compared for event in events)
        return [*found, outs.said] if lacking else found

    def _nothing_common(self, steps: Guard) -> str:
        a, b = self.a.called(), self.b.called()
        if not a or not b:
            empty = "reference" if not a else "port"
            chosen = (self.a if not a else self.b).trace.header.selection
            return (
                f"the trace of the {empty} holds no module (recorded were {dict(chosen)}): record "
                "it with layers and steps that it has"
            )
        if steps.holds is False and self.alignment.matches:
            return f"no step in common: {steps.said}"
        return (
            f"no module in common: the reference has {a[-1].name!r} ({a[-1].cls}), the port "
            f"{b[-1].name!r} ({b[-1].cls}); say which is which with rules, as "
            f"{{{a[-1].name!r}: {b[-1].name!r}}}, or record weights in the header"
        )

    def _coverage(self, calls: Sequence[Called], weights: int) -> Coverage:
        done = {c.match.b.name: c for c in calls if c.ins.compared or c.outs.compared}
        ours = {call.match.a.name for call in done.values()}
        return Coverage(
            len(done),
            len(self.a.called()),
            len(self.b.called()),
            tuple(m.name for m in self.a.called() if m.name not in ours),
            tuple(m.name for m in self.b.called() if m.name not in done),
            weights,
        )

    def _notes(
        self,
        notes: Sequence[str],
        calls: Sequence[Called],
        walk: Walk,
        floor: Floor | None,
        thresholds: Thresholds,
        isolated: bool,
    ) -> list[str]:
        found = [*self.alignment.notes, *notes]
        for part in self.alignment.fused:
            side = "port" if part.whole_side == "b" else "reference"
            found.append(
                f"{part.part} is part {part.start}:{part.stop} of {part.count} along dimension "
                f"{part.dim} of the {side}'s {part.whole}"
            )
        for event in walk.healed:
            what = "output" if event.out else "input"
            found.append(
                f"{event.call.b.module!r}: its {what} differs in form only; what follows agrees"
            )
        if floor is None and walk.culprit is None and not isolated:
            found.append("thresholds are the fallback of the dtype: calibrate for tighter ones")
        if isolated and walk.culprit is not None and (name := walk.unfed_inside):
            found.append(
                f"not everything inside {name!r} was fed: have the reference keep it whole "
                f"(tensors={_pattern(name)!r}) to look further inside"
            )
        found += [*walk.choices.notes(), *noise_notes(calls), *output_notes(calls)]
        found += floor.notes if floor is not None else ()
        for one in (self.a, self.b):
            lost = len(one.trace.header.weights) - len(one.weights)
            found += [f"{lost} fingerprints of the {one.name} are none, left out"] if lost else []
        found += [f"the tolerance for {one!r} fits no module" for one in thresholds.unused]
        found += [*self.a.trace.notes, *self.b.trace.notes]
        return list(dict.fromkeys(found))


def _activation(culprit: Culprit | None) -> bool:
    return culprit is not None and culprit.kind != "parameter"


def _pattern(name: str) -> str:
    return rf"^{re.escape(name)}(\.|$)"


def _grey(events: Sequence[Event]) -> str:
    first = min(events, key=lambda event: event.at)
    name = first.call.b.module or "the model"
    better = "have the reference keep more modules whole, those that this is computed from"
    if first.drift is None:
        better = "isolate the modules, or calibrate"
    elif first.drift == 0:
        better = "run both in float32: its own arithmetic multiplies every rounding"
    return (
        f"errors from {name!r} on ({first.error:.1e}) are as large as rounding in this dtype makes "
        f"them, and as faults do: {better}"
    )


def _others(calls: Sequence[Called], walk: Walk, culprit: Culprit) -> tuple[str, ...]:
    """Modules after the culprit that differ although their inputs agree, innermost ones."""
    found: dict[str, Called] = {}
    around = _around(calls, walk, culprit)
    for call in calls:
        event = call.outs
        own = event.status == "inherited" and call.ins.agrees and call.match.firm
        over = event.worst is None or event.worst.ratio > 1
        if own and over and call.b.module != culprit.module and call.b not in around:
            found.setdefault(call.b.module, call)
    inner = [
        name
        for name, call in found.items()
        if not any(other.b.within(call.b) for other in found.values())
    ]
    return tuple(inner)


def _around(calls: Sequence[Called], walk: Walk, culprit: Culprit) -> set[Frame]:
    """The calls around what is blamed and around the culprit's other calls: they are not right
    either, because of it.
    """
    inner = [call.b for call in calls if call.b.module == culprit.module]
    inner += [walk.blamed.call.b] if walk.blamed is not None else []
    found: set[Frame] = set()
    for frame in inner:
        at = frame.parent
        while at is not None and at not in found:
            found.add(at)
            at = at.parent
    return found


def _further(walk: Walk, culprit: Culprit) -> tuple[str, ...]:
    """Modules that differ as well, computed from the reference's own tensors."""
    names = (one.module for one in walk.further if one.module != culprit.module)
    return tuple(dict.fromkeys(names))


def _path(trace: Trace) -> str:
    return str(trace.paths[0]) if trace.paths else ""
