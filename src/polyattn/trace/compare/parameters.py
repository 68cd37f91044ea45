"""Weights of aligned modules that are not the same: what differs, and how one can tell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polyattn.errors import TraceError
from polyattn.trace.compare.alignment import Alignment, Match
from polyattn.trace.compare.distance import precision
from polyattn.trace.compare.side import Side, alike
from polyattn.trace.compare.weights import Weight
from polyattn.trace.statistics.sketch import distance

__all__ = ["Difference", "count", "differences", "meant"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A weight that differs. `kind`: "values"; "layout", the same values in other places, which
    another class may want so; or "shape". `error`: relative; `threshold`: what rounding explains.
    """

    match: Match
    param: str
    kind: str
    error: float
    threshold: float
    said: str


def count(alignment: Alignment) -> int:
    """How many weights have a counterpart that they can be compared with."""
    return sum(1 for match in alignment.matches.values() for _ in _pairs(match))


def differences(a: Side, b: Side, alignment: Alignment) -> list[Difference]:
    """Return the weights that differ, in the order in which the port's modules first run."""
    found = []
    called = {module.name: at for at, module in enumerate(b.called())}
    names = sorted(alignment.matches, key=lambda name: called.get(name, len(called)))
    for name in names:
        match = alignment.matches[name]
        for ours, theirs in _pairs(match):
            one = _difference(match, theirs, match.a.params[ours], match.b.params[theirs], a)
            if one is not None:
                found.append(one)
    return found


def _pairs(match: Match) -> Iterator[tuple[str, str]]:
    """Parameters of both sides: by name, by values, then those of the same size, in order."""
    ours, theirs = dict(match.a.params), dict(match.b.params)
    for name in list(theirs):
        if name in ours:
            yield name, name
            del ours[name], theirs[name]
    for accept in (_same, _as_large):
        for name in list(theirs):
            fits = [one for one in ours if accept(ours[one], theirs[name])]
            if fits:
                yield fits[0], name
                del ours[fits[0]], theirs[name]


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    a, b = Weight.read(one), Weight.read(other)
    return a is not None and b is not None and a.same_values(b)


def _as_large(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return sorted(one.get("shape", ())) == sorted(other.get("shape", ()))


def _difference(
    match: Match, param: str, one: Mapping[str, Any], other: Mapping[str, Any], a: Side
) -> Difference | None:
    x, y = Weight.read(one), Weight.read(other)
    if x is None or y is None:
        return None
    shapes = [list(w.get("shape", ())) for w in (one, other)]
    limit = max(2.0**-22, precision(str(one.get("dtype"))), precision(str(other.get("dtype"))))
    if x.moments.n != y.moments.n:
        said = f"shape {shapes[1]}, expected {shapes[0]}"
        return Difference(match, param, "shape", math.inf, limit, said)
    error = _apart(one, other)
    if shapes[0] == shapes[1] and error <= limit:
        return None
    if x.same_values(y):
        turned = shapes[0] != shapes[1]
        if turned:  # another layout of another shape is meant
            return None
        said = "the same values in other places" + (
            ": transposed?" if len(shapes[0]) == 2 and shapes[0][0] == shapes[0][1] else ""
        )
        return Difference(match, param, "layout", error, limit, said)
    return Difference(match, param, "values", error, limit, _origin(match, param, y, a))


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    try:
        return distance(str(one["sketch"]), str(other["sketch"]))
    except (KeyError, TraceError):
        return 0.0 if _same(one, other) else math.inf


def _origin(match: Match, param: str, values: Weight, a: Side) -> str:
    for name, fingerprint in a.weights.items():
        known = Weight.read(fingerprint)
        own = f"{match.a.name}.{param}".lstrip(".")
        if known is not None and name != own and known.same_values(values):
            return f"other values: those of the reference's {name!r}"
    return "other values"


def meant(difference: Difference) -> bool:
    """Whether another class may want this layout."""
    return difference.kind == "layout" and not alike(difference.match.a.cls, difference.match.b.cls)
