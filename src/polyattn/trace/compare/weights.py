"""Which weight is which: whole, transposed, part of a fused one, tied; by fingerprints."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

from polyattn.errors import TraceError
from polyattn.trace.compare.distance import precision
from polyattn.trace.compare.side import Module, alike
from polyattn.trace.fingerprints import Moments, matches, moments, slices

__all__ = ["Fused", "Weight", "by_weights", "constant", "fused", "read_moments"]

_PARTS = 12


@dataclass(frozen=True, slots=True)
class Weight:
    """What is known of a weight's values: their moments, and how they are rounded."""

    moments: Moments
    eps: float

    @classmethod
    def read(cls, fingerprint: Mapping[str, Any]) -> Weight | None:
        """The weight of a fingerprint, None where it holds none."""
        found = read_moments(fingerprint)
        eps = precision(str(fingerprint.get("dtype", "")))
        return None if found is None else cls(found, eps)

    def same_values(self, other: Weight) -> bool:
        """Whether both have the same values in some order, one side perhaps rounded further."""
        a, b = self.moments, other.moments
        if self.eps == other.eps or not a.n or a.n != b.n:
            return matches(a, b)
        eps = max(self.eps, other.eps)
        largest = max(abs(a.min), abs(a.max))
        sums = 8 * eps / math.sqrt(a.n)  # independent roundings
        return (
            abs(a.min - b.min) <= eps * largest
            and abs(a.max - b.max) <= eps * largest
            and abs(a.sum - b.sum) <= sums * math.sqrt(a.n * a.sum2)
            and abs(a.sum2 - b.sum2) <= sums * a.sum2
        )


@dataclass(frozen=True)
class Fused:
    """A weight of one side that is a run of slices of a weight of the other.

    `whole_side`: which side has the whole, "a" or "b". `start`, `stop` of `count` equal blocks.
    """

    part: str
    whole: str
    whole_side: str
    dim: int
    start: int
    stop: int
    count: int


def read_moments(fingerprint: Mapping[str, Any]) -> Moments | None:
    """The moments of a fingerprint, None where it holds none."""
    try:
        found = moments(fingerprint)
    except TraceError:
        return None
    return found if found.sum2 >= 0 else None


def constant(of: Moments) -> bool:
    """Whether all its values are the same, as in a new norm: it tells nothing of which it is."""
    return of.n == 0 or of.min == of.max


def by_weights(
    a: Sequence[Module], b: Sequence[Module]
) -> tuple[list[tuple[Module, Module]], list[str]]:
    """Return modules that hold the same weights, and notes on what was ambiguous.

    `a` and `b` in execution order. Several that fit are told apart by class, then by their order.
    """
    ours = {module: _telling(module) for module in a}
    theirs = {module: _telling(module) for module in b}
    index: dict[int, list[tuple[Module, Weight]]] = defaultdict(list)
    for module, found in theirs.items():
        for one in found:
            index[one.moments.n].append((module, one))
    scores: dict[Module, dict[Module, float]] = {}
    for module, found in ours.items():
        shared: dict[Module, int] = defaultdict(int)
        for one in found:
            for other in dict.fromkeys(m for m, w in index[one.moments.n] if one.same_values(w)):
                shared[other] += 1
        scores[module] = {
            other: n / max(len(found), len(theirs[other])) for other, n in shared.items()
        }
    return _choose(scores)


def _telling(module: Module) -> list[Weight]:
    found = [Weight.read(one) for one in module.params.values()]
    return [one for one in found if one is not None and not constant(one.moments)]


def _choose(
    scores: dict[Module, dict[Module, float]],
) -> tuple[list[tuple[Module, Module]], list[str]]:
    pairs, notes, taken = [], [], set()
    for only_clear in (True, False):
        for module in list(scores):
            free = {one: s for one, s in scores[module].items() if one not in taken}
            if not free:
                continue
            best = max(free.values())
            chosen = [one for one in free if free[one] == best]
            rivals = [m for m in scores if m is not module and chosen[0] in scores[m]]
            if only_clear and (len(chosen) > 1 or rivals):
                continue
            same = [one for one in chosen if alike(one.cls, module.cls)] or chosen
            if len(chosen) > 1:
                notes.append(
                    f"{module.name!r} has the weights of {len(chosen)} modules "
                    f"({', '.join(repr(one.name) for one in chosen[:3])}); taken for "
                    f"{same[0].name!r} by class and order"
                )
            pairs.append((module, same[0]))
            taken.add(same[0])
            del scores[module]
    return pairs, notes


def fused(a: Mapping[str, Mapping[str, Any]], b: Mapping[str, Mapping[str, Any]]) -> list[Fused]:
    """Return which weights of either side are equal slices of larger ones of the other.

    `a`, `b`: fingerprints, by name, of the weights that have no counterpart.
    """
    return [*_parts(a, b, "b"), *_parts(b, a, "a")]


def _parts(
    parts: Mapping[str, Mapping[str, Any]], wholes: Mapping[str, Mapping[str, Any]], side: str
) -> Iterable[Fused]:
    smallest = _by_smallest(wholes)
    for name, fingerprint in parts.items():
        part = read_moments(fingerprint)
        if part is None or constant(part):
            continue
        for whole in smallest.get(part.min, ()):
            of = read_moments(wholes[whole])
            if of is not None and of.n > part.n:
                found = _place(part, wholes[whole], of.n)
                if found is not None:
                    yield Fused(name, whole, side, *found)
                    break


def _by_smallest(wholes: Mapping[str, Mapping[str, Any]]) -> dict[float, dict[str, None]]:
    """Weights by the smallest number of each of their slices: a part has that of one of them."""
    found: dict[float, dict[str, None]] = defaultdict(dict)
    for name, fingerprint in wholes.items():
        for dim, count in _stored(fingerprint):
            for block in _slices(fingerprint, dim, count):
                found[block.min][name] = None
    return found


def _stored(fingerprint: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Along which dimensions into how many slices a fingerprint is divided, at the finest."""
    try:
        slices_ = fingerprint.get("slices", {})
        return [(int(dim), int(count)) for dim, counts in slices_.items() for count in counts]
    except (AttributeError, TypeError, ValueError):
        return []


def _slices(fingerprint: Mapping[str, Any], dim: int, count: int) -> list[Moments]:
    try:
        return slices(fingerprint, dim, count) or []
    except TraceError:
        return []


def _place(part: Moments, whole: Mapping[str, Any], n: int) -> tuple[int, int, int, int] | None:
    """Dimension, first and last slice, and how many there are, of a part in a whole."""
    ratio = Fraction(part.n, n)
    stored = _stored(whole)
    for dim in dict.fromkeys(dim for dim, _ in stored):
        counts = sorted({*range(2, _PARTS + 1), *(count for at, count in stored if at == dim)})
        for count in counts:
            if count % ratio.denominator:
                continue
            blocks = _slices(whole, dim, count)
            width = int(ratio * count)
            for start in range(len(blocks) - width + 1):
                joined = list(accumulate(blocks[start : start + width], Moments.__add__))[-1]
                if matches(joined, part):
                    return dim, start, start + width, count
    return None
