"""Alignment: which module of the reference is which of the port, and how that was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyattn.trace.compare import alignment_by_place as order
from polyattn.trace.compare import rules, weights
from polyattn.trace.compare.frames import Frame
from polyattn.trace.compare.side import Module, Side, alike, same_class
from polyattn.trace.fingerprints import matches

__all__ = ["Alignment", "Match", "align", "calls"]


@dataclass(frozen=True, slots=True)
class Match:
    """A module `a` of the reference and `b` of the port. `how`: name, rule, prefix, weights,
    contents or order. `firm`: whether both are surely the same piece of the model, from its name
    or weights and its class; where not, a difference that nothing after it shows is none.
    """

    a: Module
    b: Module
    how: str
    firm: bool


@dataclass
class Alignment:
    """The matches by the port's names; weights that are parts of others; notes."""

    matches: dict[str, Match] = field(default_factory=dict)
    fused: list[weights.Fused] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> dict[str, str]:
        """The reference's names with the port's."""
        return {match.a.name: name for name, match in self.matches.items()}


def align(a: Side, b: Side, given: Sequence[rules.Rule] = ()) -> Alignment:
    """Return the alignment of two sides: by rules and names, by weights, then by place."""
    found = Alignment()
    ruled, found.notes = rules.apply(given, a.modules, b.modules)
    _take(found, a, b, ruled, "rule")
    free_a, free_b = _free(a, b, found)
    same = {name: name for name in free_a if name in free_b and _plausible(a, b, name)}
    both = [n for n in same if bool(a.modules[n].frames) == bool(b.modules[n].frames)]
    _take(found, a, b, {name: name for name in both}, "name")
    free_a, free_b = _free(a, b, found)
    prefixed = order.by_suffix([n for n in free_a if n not in same], [n for n in free_b if n])
    fits = {n: o for n, o in prefixed.items() if _compatible(a.modules[n], b.modules[o])}
    _take(found, a, b, fits, "prefix")
    _by_weights(found, a, b)
    for _ in range(16):
        before = len(found.matches)
        _take(found, a, b, order.by_contents(a, b, found.names), "contents")
        _take(found, a, b, order.by_place(a, b, found.names), "order")
        if len(found.matches) == before:
            break
    free_a, free_b = _free(a, b, found)
    _take(found, a, b, {n: n for n in free_a if n in free_b and _plausible(a, b, n)}, "name")
    found.fused = weights.fused(*_unmatched_weights(found, a, b))
    return found


def _take(found: Alignment, a: Side, b: Side, names: Mapping[str, str], how: str) -> None:
    taken = {match.a.name for match in found.matches.values()}
    for name, other in names.items():
        if name in taken or other in found.matches:
            continue
        one, two = a.modules[name], b.modules[other]
        firm = how != "contents" and (same_class(one.cls, two.cls) or name == "")
        found.matches[other] = Match(one, two, how, firm)
        taken.add(name)


def _free(a: Side, b: Side, found: Alignment) -> tuple[list[str], set[str]]:
    taken = {match.a.name for match in found.matches.values()}
    return (
        [name for name in a.modules if name not in taken],
        {name for name in b.modules if name not in found.matches},
    )


def _compatible(one: Module, other: Module) -> bool:
    """Whether both or neither hold weights, or their classes are alike."""
    return alike(one.cls, other.cls) or bool(one.params) == bool(other.params)


def _plausible(a: Side, b: Side, name: str) -> bool:
    """Whether the same name means the same module; a number in a sequence may have moved."""
    one, other = a.modules[name], b.modules[name]
    if not one.cls or not other.cls or alike(one.cls, other.cls):
        return True
    if not _compatible(one, other):
        return False
    if not one.leaf.isdigit():
        return True
    return not (_sibling_alike(b, other, one.cls) or _sibling_alike(a, one, other.cls))


def _sibling_alike(side: Side, module: Module, cls: str) -> bool:
    around = module.name.rpartition(".")[0]
    return any(
        alike(one.cls, cls)
        for one in side.modules.values()
        if one.name.rpartition(".")[0] == around and one is not module and one.cls
    )


def _by_weights(found: Alignment, a: Side, b: Side) -> None:
    free_a, free_b = _free(a, b, found)
    pairs, notes = weights.by_weights(
        [m for m in _in_order(a) if m.name in set(free_a) and m.params],
        [m for m in _in_order(b) if m.name in free_b and m.params],
    )
    found.notes += notes
    for one, other in pairs:
        found.matches[other.name] = Match(one, other, "weights", same_class(one.cls, other.cls))


def _in_order(side: Side) -> list[Module]:
    return list(dict.fromkeys([*side.called(), *side.modules.values()]))


def _unmatched_weights(
    found: Alignment, a: Side, b: Side
) -> tuple[dict[str, Mapping[str, Any]], dict[str, Mapping[str, Any]]]:
    ours, theirs = dict(a.weights), dict(b.weights)
    for match in found.matches.values():
        if match.how == "weights" or _same_weights(match):
            for side, module in ((ours, match.a), (theirs, match.b)):
                for param in module.params:
                    side.pop(f"{module.name}.{param}".lstrip("."), None)
    return ours, theirs


def _same_weights(match: Match) -> bool:
    for param in match.a.params.keys() & match.b.params.keys():
        one = weights.read_moments(match.a.params[param])
        other = weights.read_moments(match.b.params[param])
        if one is None or other is None or one.n != other.n:
            return False
        if not matches(one, other):
            return True  # the same place with other values: a difference, not a part of another
    return True


def calls(match: Match) -> tuple[list[tuple[Frame, Frame]], list[Frame], list[Frame], str | None]:
    """Pair a match's calls: step by step, the n-th with the n-th.

    Return the pairs, calls of the reference and of the port without a partner, and what to say.
    Where one side has no steps at all, calls are counted through the run.
    """
    whole = any(all(f.step is None for f in m.frames) for m in (match.a, match.b))
    ours, theirs = _grouped(match.a, whole), _grouped(match.b, whole)
    pairs: list[tuple[Frame, Frame]] = []
    missing: list[Frame] = []
    extra: list[Frame] = []
    said = None
    for key in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(key, []), theirs.get(key, [])
        pairs += zip(one, other, strict=False)
        missing += one[len(other) :]
        extra += other[len(one) :]
        if one and other and len(one) != len(other) and said is None:
            when = "" if key[0] is None else f" in step {key[0]}"
            said = f"{match.b.name!r} ran {len(other)} times{when}, in the reference {len(one)}"
    return pairs, missing, extra, said


def _grouped(module: Module, whole: bool) -> dict[tuple[object, ...], list[Frame]]:
    found: dict[tuple[object, ...], list[Frame]] = {}
    for frame in module.frames:
        key = (None if whole else frame.step, frame.rank, frame.backward)
        found.setdefault(key, []).append(frame)
    return found
