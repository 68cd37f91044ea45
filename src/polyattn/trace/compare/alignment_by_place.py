"""Alignment by place: wrappers by what they hold, modules without weights by when they run."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from polyattn.trace.compare.distance import distance
from polyattn.trace.compare.frames import Frame, ancestors
from polyattn.trace.compare.side import Module, Side, alike
from polyattn.trace.format.record import Record

__all__ = ["by_contents", "by_place", "by_suffix"]

Names = Mapping[str, str]

_CLOSE = 1e-3


def by_suffix(a: Sequence[str], b: Sequence[str]) -> dict[str, str]:
    """Return names that are the same after one side's common prefix, a's to b's.

    >>> by_suffix(["embed", "h.0", "h.1"], ["model.embed", "model.h.0", "model.h.1", "x.h.1"])
    {'embed': 'model.embed', 'h.0': 'model.h.0', 'h.1': 'model.h.1'}
    """
    for ours, theirs, turned in ((a, b, False), (b, a, True)):
        counts: dict[str, int] = {}
        known = {name for name in ours if name}
        for name in theirs:
            for above in ancestors(name):
                if above and name[len(above) + 1 :] in known:
                    counts[above] = counts.get(above, 0) + 1
        if not counts:
            continue
        prefix = max(counts, key=lambda one: counts[one])
        if counts[prefix] < max(2, len(known) // 3):
            continue
        there = set(theirs)
        found = {name: f"{prefix}.{name}" for name in ours if f"{prefix}.{name}" in there}
        return {other: name for name, other in found.items()} if turned else found
    return {}


def by_contents(a: Side, b: Side, pairs: Names) -> dict[str, str]:
    """Return modules without a counterpart that hold, in both sides, the same aligned modules."""
    found: dict[str, str] = {}
    back = {other: name for name, other in pairs.items()}
    inside = _inside(pairs)
    outside = _inside(back)
    for module in sorted(a.called(), key=lambda one: -one.name.count(".")):
        held = inside.get(module.name)
        if module.name in pairs or not held:
            continue
        around = [set(ancestors(pairs[name])) for name in held]
        common = sorted(set.intersection(*around), key=lambda name: -len(name))
        fits = [
            b.modules[name]
            for name in common
            if name in b.modules
            and b.modules[name].frames
            and name not in back
            and name not in found.values()
            and outside.get(name, set()) == {pairs[one] for one in held}
        ]
        fits = [one for one in fits if one.sizes()[:1] == module.sizes()[:1]]
        if fits:
            best = max(fits, key=lambda one: (one.leaf == module.leaf, alike(one.cls, module.cls)))
            found[module.name] = best.name
    return found


def _inside(names: Names) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in names:
        for above in ancestors(name):
            found.setdefault(above, set()).add(name)
    return found


def by_place(a: Side, b: Side, pairs: Names) -> dict[str, str]:
    """Return modules that run at the same place between aligned ones, alike in class and size.

    Then those that were given the same values; then, where exactly one is left on each side of a
    gap, or the same sequence of sizes, these. Modules that return what they are given (Dropout,
    Identity) are never paired with one that does not.
    """
    back = {other: name for name, other in pairs.items()}
    found: dict[str, str] = {}
    theirs = {None if name is None else back[name]: run for name, run in _runs(b, back).items()}
    for parent, ours in _runs(a, pairs).items():
        for gap_a, gap_b in _gaps(ours, theirs.get(parent, []), pairs, set(back)):
            found |= _gap(gap_a, gap_b)
    return found


def _runs(side: Side, known: Names) -> dict[str | None, list[Module]]:
    """What ran directly inside each aligned module, in order; inside none of them under None."""
    found: dict[str | None, list[Module]] = {}
    for module in side.called():
        frame = module.frames[0]
        if not frame.backward:
            found.setdefault(_aligned_around(frame, known), []).append(module)
    return found


def _aligned_around(frame: Frame, known: Names) -> str | None:
    at = frame.parent
    while at is not None and at.module not in known:
        at = at.parent
    return at.module if at is not None else None


def _gaps(
    ours: list[Module], theirs: list[Module], pairs: Names, taken: set[str]
) -> list[tuple[list[Module], list[Module]]]:
    """The runs of unaligned modules between aligned ones that come in the same order."""
    place = {module.name: at for at, module in enumerate(theirs)}
    cuts, last = [(-1, -1)], -1
    for at, module in enumerate(ours):
        other = place.get(pairs.get(module.name, "\0"))
        if other is not None and other > last:
            last = other
            cuts.append((at, other))
    cuts.append((len(ours), len(theirs)))
    found = []
    for (from_a, from_b), (to_a, to_b) in pairwise(cuts):
        gap_a = [m for m in ours[from_a + 1 : to_a] if m.name not in pairs]
        gap_b = [m for m in theirs[from_b + 1 : to_b] if m.name not in taken]
        if gap_a and gap_b:
            found.append((gap_a, gap_b))
    return found


def _gap(gap_a: list[Module], gap_b: list[Module]) -> dict[str, str]:
    pairs: dict[Module, Module] = {}
    for stage in (_same_kinds, _same_leaves, _same_values, _one_left, _same_sequence):
        rest_a = [module for module in gap_a if module not in pairs]
        rest_b = [module for module in gap_b if module not in pairs.values()]
        if not rest_a or not rest_b:
            break
        pairs |= stage(rest_a, rest_b)
    return {module.name: other.name for module, other in pairs.items()}


_Pairs = dict[Module, Module]


def _same_kinds(a: list[Module], b: list[Module]) -> _Pairs:
    keys: list[list[tuple[object, ...]]] = [
        [(_kind(m.cls), m.sizes()[:1]) for m in side] for side in (a, b)
    ]
    return _blocks(a, b, SequenceMatcher(None, keys[0], keys[1], autojunk=False))


def _blocks(a: list[Module], b: list[Module], found: SequenceMatcher[tuple[object, ...]]) -> _Pairs:
    return {
        a[start_a + at]: b[start_b + at]
        for start_a, start_b, size in found.get_matching_blocks()
        for at in range(size)
    }


def _same_leaves(a: list[Module], b: list[Module]) -> _Pairs:
    """Of the same last name, where only one has it; numbers are no names."""
    found: _Pairs = {}
    for one in a:
        fits = [m for m in b if m.leaf == one.leaf and m.sizes()[:1] == one.sizes()[:1]]
        alone = len(fits) == 1 and fits[0] not in found.values() and not one.leaf.isdigit()
        if alone:
            found[one] = fits[0]
    return found


def _same_values(a: list[Module], b: list[Module]) -> _Pairs:
    """Which were given the same, and returned the same or as much; in order where several were."""
    a = [m for m in a if m.frames[0].ins and not m.idle()]
    near = _by_norm(b)
    fed = {one: [m for m in near(one) if _agree(one.frames[0].ins, m.frames[0].ins)] for one in a}
    fed = {one: [m for m in fits if not m.idle()] or fits for one, fits in fed.items()}
    found: _Pairs = {}
    for one, others in fed.items():
        for other in others:
            same = _agree(one.frames[0].outs, other.frames[0].outs)
            if same and other not in found.values() and bool(one.params) == bool(other.params):
                found[one] = other
                break
    for one, others in fed.items():
        if one in found:
            continue
        rest = [m for m in others if m not in found.values() and m.sizes() == one.sizes()]
        rivals = [m for m in fed if m not in found and rest and rest[0] in fed[m]]
        if rest and len(rest) == len([m for m in rivals if m.sizes() == one.sizes()]):
            found[one] = rest[0]
    return found


def _by_norm(modules: list[Module]) -> Callable[[Module], list[Module]]:
    """Return what finds, of `modules`, those whose first input is about as large as one's."""
    norms: dict[int, list[tuple[float, int]]] = {}
    for at, module in enumerate(modules):
        for record in module.frames[0].ins[:1]:
            norms.setdefault(record.n, []).append((record.l2 or 0.0, at))
    for known in norms.values():
        known.sort()

    def near(module: Module) -> list[Module]:
        record = module.frames[0].ins[0]
        size, known = record.l2 or 0.0, norms.get(record.n, [])
        low, high = size * (1 - _CLOSE), size * (1 + _CLOSE)
        found = known[bisect_left(known, (low, -1)) : bisect_right(known, (high, len(modules)))]
        return [modules[at] for at in sorted(at for _, at in found)]

    return near


def _agree(a: Sequence[Record], b: Sequence[Record]) -> bool:
    if len(a) != len(b) or not a:
        return False
    apart = [distance(one, other) for one, other in zip(a, b, strict=True)]
    return all(one.comparable and one.error <= _CLOSE for one in apart)


def _one_left(a: list[Module], b: list[Module]) -> _Pairs:
    a, b = ([m for m in side if not m.idle()] for side in (a, b))
    return {a[0]: b[0]} if len(a) == len(b) == 1 and _exchangeable(a[0], b[0]) else {}


def _same_sequence(a: list[Module], b: list[Module]) -> _Pairs:
    """All that is left, where both sides take and return the same sizes one after the other."""
    a, b = ([m for m in side if not m.idle()] for side in (a, b))
    keys = [[(_taken(m), m.sizes(), len(m.frames[0].children)) for m in side] for side in (a, b)]
    return dict(zip(a, b, strict=True)) if len(a) > 1 and keys[0] == keys[1] else {}


def _taken(module: Module) -> tuple[int, ...]:
    return tuple(record.n for record in module.frames[0].ins)


def _exchangeable(a: Module, b: Module) -> bool:
    """Whether two modules take and give as many numbers, and neither holds others or weights."""
    one, other = a.frames[0], b.frames[0]
    taken = [sorted(r.n for r in frame.ins) for frame in (one, other)]
    plain = not (one.children or other.children or a.params or b.params)
    return plain and bool(taken[0]) and taken[0] == taken[1] and a.sizes() == b.sizes()


def _kind(cls: str) -> str:
    return "".join(filter(str.isalnum, cls)).lower()
