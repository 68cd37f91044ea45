"""Counterparts: which tensor of the reference may take the place of which of the port's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polyattn.trace.compare import rules as rules_
from polyattn.trace.compare.alignment import align
from polyattn.trace.compare.called import Event, Tensor
from polyattn.trace.compare.differences_of_form import Form
from polyattn.trace.compare.distance import distance, floating
from polyattn.trace.compare.judge import judge
from polyattn.trace.compare.side import Side
from polyattn.trace.compare.thresholds import Thresholds
from polyattn.trace.format.contents import Trace
from polyattn.trace.format.record import Record

__all__ = ["Counterparts", "Key", "counterparts", "key_of"]

Key = tuple[str, int, str, str]
"""Module, call, phase and tensor of the port."""

_NEAR = 0.1
_SURELY = ("name", "rule", "prefix", "weights")


def key_of(record: Record) -> Key:
    """Return what a record of the port is found by."""
    return record.module, record.call, record.phase, record.tensor


@dataclass(frozen=True)
class Counterparts:
    """`records`: the reference's record for tensors of the port. `forms`: those of the port that
    mean the same in another form, as everything after them agrees.
    """

    records: Mapping[Key, Record]
    forms: frozenset[Key]


def counterparts(a: Trace, b: Trace, rules: rules_.Given = None) -> Counterparts:
    """Return the reference's record for each tensor of the port that means the same.

    Both are ordinary traces. Of aligned modules that is the main tensor, and of modules that are
    surely the same piece also what is counted rather than measured; anything else only where it is
    about the same number by number, for a mask, a table of angles or a wrapper may have another
    form in a port and be right.

    >>> import tempfile
    >>> from polyattn.trace import TraceWriter, read
    >>> path = tempfile.mkdtemp() + "/run.jsonl"
    >>> with TraceWriter(path) as trace:
    ...     _ = trace.add("up", "out", "out", [1.0, 2.0])
    >>> {key: one.seq for key, one in counterparts(read(path), read(path)).records.items()}
    {('up', 0, 'out', 'out'): 0}
    """
    one, other = Side(a, "reference"), Side(b, "port")
    steps = {*one.steps(), *other.steps()}
    calls = judge(align(one, other, rules_.parse(rules)), Thresholds(), steps)[0]
    form = Form(calls, {call.b: call for call in calls}, a.records)
    records: dict[Key, Record] = {}
    forms: set[Key] = set()
    for event in (event for call in calls for event in call.events()):
        if event.call.b.backward:
            continue
        if form.only(event):
            forms.update(key_of(one.b) for one in event.tensors if one.ratio > 1)
        for pair in event.tensors:
            key = key_of(pair.b)
            if key not in forms and not _passed_over(pair) and _means_the_same(event, pair):
                records[key] = pair.a
    return Counterparts(records, frozenset(forms))


def _means_the_same(event: Event, pair: Tensor) -> bool:
    match = event.call.match
    measured = floating(pair.a.dtype)
    aligned = match.firm or match.how in _SURELY
    main = measured and pair is next(t for t in event.tensors if floating(t.a.dtype))
    sure = (main and aligned) or (not measured and match.firm)
    return _alike(pair.a, pair.b) and (sure or _near(pair.a, pair.b))


def _passed_over(pair: Tensor) -> bool:
    """Whether it differs without effect, as a mask of the opposite convention: then the port needs
    its own.
    """
    return not pair.distance.comparable and distance(pair.a, pair.b).comparable


def _alike(a: Record, b: Record) -> bool:
    """Whether the shapes are the same up to dimensions of 1, and the kinds of numbers."""
    sizes = [[size for size in record.shape if size != 1] for record in (a, b)]
    kinds = [
        (floating(record.dtype), record.dtype.startswith("complex"), record.dtype == "bool")
        for record in (a, b)
    ]
    whole = a.global_shape is None and not a.partial
    return sizes[0] == sizes[1] and kinds[0] == kinds[1] and a.n > 0 and whole


def _near(a: Record, b: Record) -> bool:
    found = distance(a, b)
    return found.comparable and not found.order and found.error <= _NEAR
