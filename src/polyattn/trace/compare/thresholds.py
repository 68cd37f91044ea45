"""Thresholds: from which error on two tensors differ, and up to which that cannot be decided.

With a calibrated floor: `K` times the largest error that reruns of the reference under perturbed
weights had at that record. Without one a fallback: a multiple of the spacing of the coarsest dtype
that the run has used so far, growing with the root of the number of modules that rounded before
(independent roundings add like that) and slowly with the size of a row (sums round as they grow).

In float32 and finer, 64 spacings found every fault of the measured suites and flagged no clean
port. In bfloat16 and float16 clean ports differ by as much as small faults do: free-running traces
cannot be decided by any single number, so there is a grey zone, and the verdict in it is "cannot
say". A module that was fed the reference's own inputs (isolate) has no inherited error: one spacing
decides in bfloat16 too. But some arithmetic amplifies a rounding, as a softmax of large scores does
that one kernel rounds and another keeps in float32. Where isolate measured how far a module's
results move if what it is fed moves by a rounding, the threshold is at least `NOISE` times that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from polyattn.errors import TraceError
from polyattn.trace.compare.calibration import Floor
from polyattn.trace.compare.distance import COARSE, Distance, floating, precision
from polyattn.trace.format.record import Record

__all__ = ["JUMP", "NOISE", "K", "Limit", "Thresholds", "Tolerance"]

K = 4.0
"""Times the floor: the largest of three perturbed runs lies below the largest of many by less than
2 (the errors are sums of many roundings), and another order of summation rounds up to twice."""

JUMP = 4.0
"""An output that is not this many times further off than its inputs has grown, not differed."""

NOISE = 2.0
"""Times the measured noise: two right implementations may be off by as much each, one to either
side (SEMANTICS: an error is right up to twice that of the same arithmetic)."""

_BASE, _CAP = 64.0, 1024.0
_GREY_LOW, _GREY_HIGH = 0.5, 8.0
_ISOLATED_FINE, _ISOLATED_COARSE = 16.0, 1.0
_LEAST = 2.0
_COHERENT, _COHERENT_ROWS = 10.0, 16

Tolerance = float | Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class Limit:
    """`value`: up to it the same. `grey`: up to it undecided; equal to `value` where none. `noise`:
    whether they are the measured noise of the module's own arithmetic.
    """

    value: float
    grey: float
    how: str
    noise: bool = False

    def coherent(self, found: Distance, a: Record, eps: float) -> bool:
        """Whether a smaller error is one common factor: rounding is not, over many rows.

        A wrong epsilon or scale shows so, far below what rounding may add up to.
        """
        rows = a.n // max(1, a.shape[-1]) if a.shape else 0
        fits = self.how == "fallback" and 0 < eps <= COARSE and rows >= _COHERENT_ROWS
        return fits and found.scale >= 0.7 and found.error > _COHERENT * eps


class Thresholds:
    """Gives the limit of each record. `tolerance`: one for all, or by patterns of modules' names.

    `floor`: calibrated, by the reference's names. `own`: errors of reruns of the same side, which
    no threshold is below.
    """

    def __init__(
        self, floor: Floor | None = None, tolerance: Tolerance = None, own: Floor | None = None
    ) -> None:
        self.floor, self.own = floor, own
        self._patterns = _patterns(tolerance)
        self.hits: set[str] = set()

    @property
    def unused(self) -> list[str]:
        """Patterns of the tolerance that no module's name had."""
        return [p.pattern for p, _ in self._patterns if p.pattern not in self.hits]

    def of(
        self,
        a: Record,
        names: tuple[str, str],
        eps: float,
        before: int,
        drift: int | None = None,
        noise: float | None = None,
    ) -> Limit:
        """Return the limit of a record of the reference.

        `names`: the module's in both; `eps`: the coarsest spacing so far; `before`: how many
        modules without others inside had returned; `drift`, `noise`: of an isolated run.
        """
        for pattern, value in self._patterns:
            if any(map(pattern.search, names)):
                self.hits.add(pattern.pattern)
                return Limit(value, value, "tolerance")
        if not floating(a.dtype):
            return Limit(1e-7, 1e-7, "exact")
        least = K * ((self.own.of(a) if self.own is not None else None) or 0.0)
        if self.floor is not None and (known := self.floor.of(a)) is not None:
            value = K * max(known, _LEAST * precision(a.dtype))
            return Limit(max(value, least), max(value, least), "calibrated")
        eps = max(eps, precision(a.dtype))
        low, high = self._fallback(a, eps, before) if drift is None else _isolated(a, eps, drift)
        own = 0.0 if drift is None or noise is None else NOISE * noise
        if own > low:  # far off is not the same for sure, however ill-conditioned it is
            low, high = max(low, min(own, _GREY_HIGH * eps)), max(high, own)
            return Limit(max(low, least), max(high, least), "fallback", noise=True)
        return Limit(max(low, least), max(high, least), "fallback")

    def _fallback(self, a: Record, eps: float, before: int) -> tuple[float, float]:
        growth, size = math.sqrt(1 + before / 16), _size(a)
        if eps > COARSE:
            return _GREY_LOW * eps, min(0.5, _GREY_HIGH * eps * growth * size)
        value = min(_CAP, _BASE * growth * size) * eps
        return value, value


def _size(a: Record) -> float:
    row = a.shape[-1] if a.shape else 1
    return float(max(1.0, row / 1024) ** 0.25)


def _isolated(a: Record, eps: float, drift: int) -> tuple[float, float]:
    """Sharp where everything was computed from the reference's tensors, blurred by what was not."""
    coarse, size = eps > COARSE, _size(a)
    value = (_ISOLATED_COARSE if coarse else _ISOLATED_FINE) * eps * size * math.sqrt(1 + drift)
    if drift == 0:
        return value, value
    if coarse:
        return value, max(value, min(0.5, _GREY_HIGH * eps * size * math.sqrt(1 + drift / 16)))
    value = min(_CAP, _BASE * size * math.sqrt(1 + drift / 16)) * eps
    return value, value


def _patterns(tolerance: Tolerance) -> list[tuple[re.Pattern[str], float]]:
    if tolerance is None:
        return []
    if not isinstance(tolerance, Mapping):
        tolerance = {"": tolerance}
    found = []
    for pattern, value in tolerance.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise TraceError(f"got the tolerance {value!r}, expected a relative error, 0 or more.")
        try:
            found.append((re.compile(pattern), float(value)))
        except (re.error, TypeError) as error:
            raise TraceError(
                f"got the tolerance's pattern {pattern!r}, expected a regular expression ({error})."
            ) from error
    return found
