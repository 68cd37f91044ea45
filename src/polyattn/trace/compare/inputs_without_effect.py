"""Inputs without effect: further ones that differ, and a port that is right may well differ so.

A buffer that a call writes over held anything before, as what `torch.empty` returns does. And a
mask of the opposite convention hides the same, where the call returns the same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from polyattn.trace.compare.called import Called, Tensor
from polyattn.trace.compare.distance import Distance, floating
from polyattn.trace.compare.frames import changed_in_place
from polyattn.trace.format.record import Record

__all__ = ["without_effect"]


def without_effect(call: Called) -> list[Tensor]:
    """Return what went into a call, where a difference counts for nothing as not comparable."""
    same = {
        (one.a.tensor, one.b.tensor)
        for one in call.outs.tensors
        if changed_in_place(one.b) and one.distance.comparable and one.ratio <= 1
    }
    found = []
    for one in call.ins.tensors:
        why = ""
        if one.ratio > 1 and (one.a.tensor, one.b.tensor) in same:
            why = "both sides write over it, and leave the same"
        elif one.ratio > 1 and not one.main and call.outs.agrees and _opposite(one.a, one.b):
            why = "a mask of the opposite convention"
        found.append(replace(one, distance=Distance(0.0, False, why)) if why else one)
    return found


def _opposite(a: Record, b: Record) -> bool:
    """Whether one is true where the other is false, as far as their records tell."""
    if not (_flags(a) and _flags(b)) or a.shape != b.shape or a.zero is None:
        return False
    ones, other = a.buckets(), b.buckets()
    if b.zero != a.n - a.zero or ones is None or other is None:
        return False
    from polyattn.trace.statistics.sketch import sketch

    return bool(np.allclose(ones + other, sketch(np.ones(a.n, np.int8)), rtol=1e-6, atol=1e-3))


def _flags(record: Record) -> bool:
    return not floating(record.dtype) and record.min in (0, 1) and record.max in (0, 1)
