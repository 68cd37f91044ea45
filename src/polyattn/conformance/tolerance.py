"""How right is right: the one place that says so, for outputs, lse and gradients.

    error(got, f64) <= 2 * error(same-dtype reference, f64) + a few ulp

*Errors* are measured per element in units of `scale`, the sum of the absolute values of the terms
that make up the element (for an output: sum_j p_j |v_j|). Rounding is in proportion to that sum
and not to the element, which may cancel to nothing; and small elements are not excused by large
neighbours, as they would be with one maximum per tensor.

*The same-dtype reference* is the oracle's naive code run in the dtype. For half types that is
what their contract promises (accumulation in float32): inputs in the half type, arithmetic in
float32, results rounded to the half type.

*A few ulp.* The reference may be exact by luck, as with one key. What a correct kernel may round
beyond that, in ulps `u` of the dtype of the value:
- a fused kernel for half types rounds the probabilities to the half type before they meet the
  values, the score gradients before they meet queries and keys, and the result: each at most u/2
  of `scale`; the row sum of the backward pass is taken from rounded outputs (u/2). Shared heads
  are added up from rounded parts (u/2). FEW = 4 leaves room for the second-order terms.
- each score carries a rounding of the accumulation type, a = ulp(float32 or wider), of its own
  magnitude `score` = scale * sum_h |q_h k_h| + |bias|, and exp turns it into a relative error of
  p: + FEW * a * score, for values that depend on p at all.
- the lse of half types is float32, but kernels for half types take fast exponentials (torch's CPU
  flash kernel: good to 2^-14). The lse serves to weigh outputs that are rounded to 2^-11 and
  coarser, so an error of FEW * 2^-14 = a quarter of the finest half type's ulp cannot be seen
  there; that, and not the ulp of float32, is its unit.
- a sum of L terms may be taken one after the other, and rounds at each: a * sqrt(L), as rounding
  errors add up when they are as often up as down.
- below the smallest normal number spacing is absolute: + FEW * u * smallest normal. That holds for
  each of the L terms, too (score gradients of 1e-7 in float16 lie there): each is off by up to
  u/2 * smallest normal times the entry it meets, which is a few in size, and L of them add up as
  sqrt(L): + FEW * u * smallest normal * sqrt(L) / 2.
- probabilities below FEW smallest normal numbers of the accumulation type may be 0: exponentials by
  polynomials end there, and processors are told to. An element may be off by what these add to it
  (`beyond`), and by FEW smallest normal numbers for products that end there.
- products of bytes round to 16 bits of the largest, see :mod:`polyattn.conformance.byte_rounding`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FEW", "Excess", "Yardstick", "measure"]

FEW = 4.0
_HALF_LSE = 2.0**-14


@dataclass(frozen=True)
class Excess:
    """A value that is further from the truth than it may be."""

    name: str
    message: str

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


@dataclass(frozen=True)
class Yardstick:
    """The truth about one value: `exact` and `scale` in float64; `baseline` gives the reference.

    `score`: the largest magnitude behind a score. `baseline` is asked only if it matters.
    """

    name: str
    exact: Tensor
    scale: Tensor
    score: float
    baseline: Callable[[], Tensor]
    terms: int = 1  # the longest sum behind a value
    half: bool = False  # a float32 value of a problem in a half type
    beyond: Tensor | None = None  # how far each element may be off beside all of that


def measure(got: Tensor, truth: Yardstick) -> Excess | None:
    """Compare one value with the truth; None when it is right. Finiteness comes first."""
    name, dtype = truth.name, got.dtype
    if got.shape != truth.exact.shape:
        return Excess(name, f"shape {tuple(got.shape)}, expected {tuple(truth.exact.shape)}")
    if got.numel() == 0:
        return None
    found = got.detach().cpu().double()
    wrong_inf = ~found.isfinite() & (found != truth.exact)
    if bool(wrong_inf.any()):
        return Excess(
            name,
            f"{_where(wrong_inf)} is {_first(found, wrong_inf)}, expected "
            f"{_first(truth.exact, wrong_inf)}",
        )
    error = _error(found, truth, dtype)
    info = torch.finfo(dtype)
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    room = (
        FEW * ((_HALF_LSE if truth.half else info.eps) + wide * truth.score)
        + wide * truth.terms**0.5
    )
    if float(error.max()) <= room:
        return None
    reference = truth.baseline().to(dtype).double()
    bound = 2 * float(_error(reference, truth, dtype).max()) + room
    bad = ~(error <= bound)
    if not bool(bad.any()):
        return None
    worst = error == error.max()
    return Excess(
        name,
        f"{_where(worst)} is {_first(found, worst):.9g}, expected "
        f"{_first(truth.exact, worst):.9g}; "
        f"error {float(error.max()):.3g} of its terms, allowed {bound:.3g} ({int(bad.sum())} of "
        f"{bad.numel()} are out of bounds)",
    )


def _error(found: Tensor, truth: Yardstick, dtype: torch.dtype) -> Tensor:
    """The distance from the truth in units of the scale; infinities are equal here."""
    same = found == truth.exact
    distance = torch.where(same, 0, (found - truth.exact).abs())
    wide = torch.finfo(torch.promote_types(dtype, torch.float32))
    distance = (distance - FEW * wide.tiny).clamp(min=0)
    if truth.beyond is not None:
        distance = (distance - truth.beyond).clamp(min=0)
    return distance / (truth.scale + torch.finfo(dtype).tiny * (1 + truth.terms**0.5 / 2))


def _where(flags: Tensor) -> str:
    return f"[{', '.join(str(int(i)) for i in flags.nonzero()[0])}]" if flags.dim() else "it"


def _first(values: Tensor, flags: Tensor) -> float:
    return float(values[flags].flatten()[0])
