"""Guards: what must hold before activations are worth comparing, and what is said otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from polyattn.errors import PolyattnError, TraceError
from polyattn.flags import diff, lines
from polyattn.trace.compare.alignment import Alignment
from polyattn.trace.compare.calibration import Floor, build
from polyattn.trace.compare.called import Called, Event
from polyattn.trace.compare.distance import Distance, floating
from polyattn.trace.compare.parameters import Difference
from polyattn.trace.compare.side import Side
from polyattn.trace.compare.verdict import Guard
from polyattn.trace.format.contents import Trace
from polyattn.trace.format.perturbed import seeds_of
from polyattn.trace.format.reader import read

__all__ = [
    "Reruns", "dtypes", "ended", "flags", "inputs", "perturbation", "repeats", "steps", "weights",
]  # fmt: skip

Given = Trace | str | Path
Reruns = Mapping[str, Given | Sequence[Given]] | None

_UNSTEADY = 1e-2


def steps(a: Side, b: Side) -> tuple[Guard, set[int | None]]:
    """Whether the same steps were recorded, and those that both have."""
    ours, theirs = a.steps(), b.steps()
    whole = any(all(step is None for step in one) for one in (ours, theirs))
    if whole:
        return Guard("steps", True if ours == theirs else None, _counted(ours, theirs)), {
            *ours,
            *theirs,
        }
    both = {step for step in ours if step in theirs}
    said = ""
    if set(ours) != set(theirs):
        said = f"steps {_few(ours)} in the reference, {_few(theirs)} in the port"
        if not both:
            said += "; record both with the same steps=..."
    return Guard("steps", not said, said), both


def _counted(ours: Sequence[int | None], theirs: Sequence[int | None]) -> str:
    if list(ours) == list(theirs):
        return ""
    return "one side has no steps: calls are counted through the run"


def _few(found: Iterable[object]) -> str:
    names = [str(one) for one in found]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def ended(a: Side, b: Side) -> Guard:
    """Whether both runs closed their traces."""
    cut = [side.name for side in (a, b) if not side.trace.ended]
    said = f"the run of the {' and of the '.join(cut)} did not end its trace" if cut else ""
    return Guard("ended", not cut, said)


def flags(a: Side, b: Side) -> Guard:
    """Whether the framework's knobs stood alike."""
    one, other = a.trace.header.flags, b.trace.header.flags
    if not one or not other:
        return Guard("flags", None, "not recorded on both sides")
    try:
        found = diff(one, other)
    except (PolyattnError, ValueError) as error:
        return Guard("flags", None, f"not comparable ({error})")
    said = lines(found)
    return Guard("flags", not found, "; ".join(said[:6]) + ("; ..." if len(said) > 6 else ""))


def perturbation(a: Side, b: Side) -> Guard:
    """Whether both runs had their weights moved by the same seed, or neither, and what is said."""
    one, other = (seeds_of(side.trace) for side in (a, b))
    if one == other:
        both = f"both were recorded with perturbed weights, --perturb {one}" if one else ""
        return Guard("perturbation", True, both)
    said = "; ".join(
        f"the {side.name} was recorded with --perturb {seed}"
        if seed
        else f"the {side.name} with the weights as they are"
        for side, seed in ((a, one), (b, other))
    )
    return Guard("perturbation", False, f"{said}: every weight that was moved differs by that")


def dtypes(calls: Sequence[Called]) -> Guard:
    """Whether aligned tensors are of the same dtypes."""
    pairs: dict[tuple[str, str], int] = {}
    for call in calls:
        for event in call.events():
            for one in event.tensors:
                kinds = (one.a.dtype, one.b.dtype)
                if kinds[0] != kinds[1] and all(map(floating, kinds)):
                    pairs[kinds] = pairs.get(kinds, 0) + 1
    said = "; ".join(
        f"{n} tensors are {x} in the reference, {y} here" for (x, y), n in pairs.items()
    )
    return Guard("dtypes", not pairs, said)


def inputs(calls: Sequence[Called], start: Event | None, unlike: Sequence[Event] = ()) -> Guard:
    """Whether both runs began with the same inputs. `unlike`: those that did not count."""
    if unlike:
        worst = unlike[0].worst
        assert worst is not None
        return Guard(
            "inputs",
            False,
            f"{worst.b.tensor} of {unlike[0].call.b.module or 'the model'!r} is not as in the "
            f"reference ({_apart(worst.distance)}), whose own was used in its place",
        )
    if start is not None:
        worst = start.worst
        assert worst is not None
        name = start.call.b.module
        return Guard(
            "inputs",
            False,
            f"{worst.b.tensor} of {name or 'the model'!r}, the first that was compared, differs "
            f"already ({_apart(worst.distance)}); give both runs the same inputs and seed",
        )
    first = next((call for call in calls if call.ins.compared), None)
    return Guard("inputs", True if first is not None else None, "" if first else "not recorded")


def _apart(distance: Distance) -> str:
    """How far an input is from the reference's, or why no number says that."""
    if distance.why and math.isinf(distance.error):
        return distance.why
    return f"error {distance.error:.1e}"


def weights(compared: int, found: Sequence[Difference]) -> Guard:
    """Whether the weights that have a counterpart are the same."""
    if not compared:
        return Guard("weights", None, "no weight has a fingerprint in both headers")
    names = list(dict.fromkeys(f"{d.match.b.name}.{d.param} ({d.said})" for d in found))
    said = f"{len(names)} of {compared} differ: {_few(names[:4])}" if names else ""
    if len(names) > max(1, compared // 2):
        said += "; these are not the same weights: load the same into both"
    return Guard("weights", not names, said)


def repeats(
    a: Side, b: Side, alignment: Alignment, reruns: Reruns
) -> tuple[Guard, Floor | None, list[str]]:
    """Whether each side agrees with further runs of itself, and how far apart those are.

    Also the sides that do not repeat at all, as with dropout or another seed.
    """
    if not reruns:
        return Guard("determinism", None, "no rerun was given"), None, []
    errors: dict[tuple[str, str, str], float] = {}
    said, unsteady, runs = [], [], 0
    names = {name: match.a.name for name, match in alignment.matches.items()}
    for key, given in reruns.items():
        if key not in ("a", "b"):
            raise TraceError(f"got reruns of {key!r}, expected of 'a' or 'b'.")
        side = a if key == "a" else b
        several = [given] if isinstance(given, Trace | str | Path) else list(given)
        loaded = [one if isinstance(one, Trace) else read(one) for one in several]
        own = build(side.trace, loaded)
        runs += own.runs
        for (module, phase, tensor), error in own.errors.items():
            name = module if key == "a" else names.get(module, module)
            at = (name, phase, tensor)
            errors[at] = max(errors.get(at, 0.0), error)
        moved = [at for at, error in own.errors.items() if error > 0]
        if moved:
            largest = max(own.errors.values())
            said.append(
                f"the {side.name} differs from its rerun by up to {largest:.1e}, first in "
                f"{moved[0][0] or 'the model'!r} ({moved[0][2]})"
            )
            unsteady += [side.name] if largest > _UNSTEADY else []
    return Guard("determinism", not said, "; ".join(said)), Floor(errors, runs), unsteady
