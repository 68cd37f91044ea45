"""How far two tensors are apart, as far as their records tell.

The sketch estimates the relative L2 distance (with 64 buckets: to about 9 percent of it). The other
statistics bound it from below, each for its own reason: no element moves further than the whole
(min, max, samples), and norms and sums move less (l2, l1, mean). The larger counts, so that what a
sketch may miss, or was not recorded, is seen where anything shows it; and nothing is ever claimed
that the tensors do not have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from polyattn.trace.format.record import UNKNOWN, Record

__all__ = ["COARSE", "EPS", "Distance", "distance", "floating", "precision"]

EPS = {
    "float64": 2.0**-52, "complex128": 2.0**-52, "float32": 2.0**-23, "complex64": 2.0**-23,
    "float16": 2.0**-10, "bfloat16": 2.0**-7, "float8_e4m3fn": 2.0**-3, "float8_e5m2": 2.0**-2,
}  # fmt: skip
"""The spacing of numbers at 1, by dtype."""

_LONGEST = 160
_ROUNDED = 2.0**-22
"""What rounding a sketch to float32 can look like, of its norm."""


@dataclass(frozen=True, slots=True)
class Distance:
    """`error`: relative to the reference's norm; infinite where shape or NaN counts differ.

    `comparable`: False where the records do not tell, and `why`. `order`: the values are the same
    in another order, by every statistic that does not see order. `scale`: how much of the distance
    is one common factor, 0 to 1. `evidence`: what besides the sketch differs.
    """

    error: float
    comparable: bool = True
    why: str = ""
    order: bool = False
    scale: float = 0.0
    evidence: str = ""
    tensor: str = ""


COARSE = 2.0**-12
"""dtypes with a wider spacing than this have a grey zone, where nothing can be decided."""


def floating(dtype: str) -> bool:
    """Whether a dtype's numbers are rounded."""
    return "float" in dtype or dtype.startswith("complex")


def precision(dtype: str) -> float:
    """The spacing of a dtype's numbers at 1; 0 for integers; coarse for what is not known."""
    return EPS.get(dtype, 2.0**-3 if floating(dtype) else 0.0)


def distance(a: Record, b: Record, rms: float = 0.0) -> Distance:
    """Return how far b is from the reference a.

    `rms`: the size of an element that is not small here; the norm that errors are relative to is
    at least a 1024th of it, so that what is nearly zero is not held to its own rounding.
    """
    if UNKNOWN in (a.dtype, b.dtype):
        return Distance(0.0, False, _note(a, b))
    if a.n != b.n:
        shapes = f"shape {list(b.shape)}, expected {list(a.shape)}"
        return Distance(math.inf, why=shapes, evidence=shapes)
    if a.n == 0:
        return Distance(0.0)
    unlike = _unlike(a, b)
    if unlike is not None:
        return unlike
    finite = a.n - (a.bad or 0)
    norm = _norm(a)
    bounds = _bounds(a, b, finite)
    sketched = _sketched(a, b)
    if sketched is not None:
        bounds["sketch"] = sketched
    if sketched is not None and a.shape != b.shape and _reordered(a, b, norm, sketched):
        # (batch, heads, tokens) here and (batch, tokens, heads) there: what does not see order
        # tells what it can, and what is wrong with the order shows in the next tensor
        bounds = {name: one for name, one in bounds.items() if name not in ("sketch", "samples")}
        why = f"shape {list(b.shape)} here, {list(a.shape)} in the reference"
        return Distance(max(bounds.values()) / (norm or 1.0), why=why, order=True)
    if not bounds or norm is None:
        return Distance(0.0, False, _note(a, b))
    least = max(norm, math.sqrt(finite) * rms / 1024)
    apart = max(bounds.values())
    error = 0.0 if apart == 0 else apart / (least or _norm(b) or apart)
    return Distance(
        error,
        order=sketched is not None and _reordered(a, b, norm, sketched),
        scale=min(1.0, bounds.get("l2", 0.0) / apart) if apart else 0.0,
        evidence=_evidence(bounds, sketched, apart),
    )


def _note(a: Record, b: Record) -> str:
    """Why two records hold nothing to compare: what they say themselves, if they do."""
    said = a.extra.get("note") or b.extra.get("note") or "neither sketch nor norms were recorded"
    return f"{said}"[:_LONGEST]


def _norm(record: Record) -> float | None:
    if record.l2 is not None:
        return record.l2
    buckets = record.buckets()
    return None if buckets is None else float(np.linalg.norm(buckets))


def _unlike(a: Record, b: Record) -> Distance | None:
    """What is to be said before any number: NaN, infinities, masks, kinds of dtype."""
    if a.bad == a.n:
        return Distance(0.0, False, "the reference is NaN or infinite everywhere")
    if _mask(a) and _mask(b):
        if a.zero != b.zero or _hidden_elsewhere(a, b):
            return Distance(math.inf, evidence="masked elements")
        if (a.ninf, a.min) != (b.ninf, b.min):
            return Distance(0.0)
    measured = floating(a.dtype) == floating(b.dtype)
    for name, said in (("nan", "NaN"), ("pinf", "+inf"), ("ninf", "-inf")):
        ours, theirs = getattr(a, name), getattr(b, name)
        if not measured and name == "ninf":
            continue  # an additive mask here, a boolean one there
        if ours is not None and theirs is not None and ours != theirs:
            text = f"{theirs} {said}, expected {ours}"
            return Distance(math.inf, why=text, evidence=text)
    if not measured:
        apart = _sketched(a, b)
        if apart is None or apart > 1e-3 * (_norm(a) or 0.0):
            return Distance(0.0, False, f"{a.dtype} here and {b.dtype} in the port")
    return None


def _mask(record: Record) -> bool:
    """Whether it is an additive mask: 0 where allowed, -inf or a huge number elsewhere."""
    if not floating(record.dtype) or not record.zero or record.max != 0:
        return False
    if record.ninf and record.zero + record.ninf == record.n:
        return True
    low = record.min or 0.0
    masked = record.n - record.zero
    return low <= -1e4 and record.l1 is not None and abs(record.l1 + low * masked) <= -1e-6 * low


def _hidden_elsewhere(a: Record, b: Record) -> bool:
    """Whether one of two masks hides what the other shows, at the places that were sampled: what
    is infinite is in no sketch.
    """
    if a.shape != b.shape or not a.samples or not b.samples or len(a.samples) != len(b.samples):
        return False
    return any((x == 0) != (y == 0) for x, y in zip(a.samples, b.samples, strict=True))


def _sketched(a: Record, b: Record) -> float | None:
    one, other = a.buckets(), b.buckets()
    if one is None or other is None:
        return None
    with np.errstate(over="ignore"):
        apart = float(np.linalg.norm(one - other))
        rounding = _ROUNDED * max(float(np.linalg.norm(one)), float(np.linalg.norm(other)))
    return apart if apart > rounding else 0.0


def _bounds(a: Record, b: Record, finite: int) -> dict[str, float]:
    """What the distance is at least, by each statistic that both sides have."""
    root = math.sqrt(finite)
    factors = {"min": 1.0, "max": 1.0, "l2": 1.0, "l1": 1 / root, "sum": 1 / root}
    factors |= {"mean": root, "abs_mean": root}
    found = {}
    for name, factor in factors.items():
        one, other = getattr(a, name), getattr(b, name)
        if one is not None and other is not None:
            size = max(abs(one), abs(other))
            apart = abs(one - other)
            found[name] = factor * apart if apart > 2e-9 * size else 0.0
    if a.samples and b.samples and len(a.samples) == len(b.samples):
        pairs = set(zip(a.samples, b.samples, strict=True))
        moved = [abs(x - y) for x, y in pairs if x is not None and y is not None]
        found["samples"] = max(moved, default=0.0)
    return found


def _reordered(a: Record, b: Record, norm: float | None, sketched: float) -> bool:
    if (
        not norm
        or sketched <= 1e-3 * norm
        or a.l1 is None
        or b.l1 is None
        or a.l2 is None
        or b.l2 is None
    ):
        return False
    root = math.sqrt(a.n)
    sizes = ((a.l1, b.l1, root), (a.l2, b.l2, 1.0), (a.min, b.min, 1.0), (a.max, b.max, 1.0))
    return all(abs((x or 0.0) - (y or 0.0)) <= 1e-5 * norm * to for x, y, to in sizes)


def _evidence(bounds: dict[str, float], sketched: float | None, apart: float) -> str:
    seen = [name for name, value in bounds.items() if name != "sketch" and value >= apart / 4]
    if sketched is not None and sketched < apart / 4:
        return f"{', '.join(seen)} (the sketch sees less)"
    return ", ".join(seen)
