"""How fast the native kernels are beside torch's own, as far as it is known of a processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from polyattn.problem import Problem
from polyattn.selection.evidence.problem_kinds import (
    KINDS,
    WIDER,
    is_array,
    is_band,
    is_small,
    is_tiny_training,
    kind_of,
    share_of,
    trains,
)

__all__ = ["UNMEASURED", "Evidence", "Figure", "Verdict"]

_FASTER, _NO_HARM = 1.02, 1 / 1.05
_FASTER_COMPILED = 1.5  # of 15 us it pays for the 5 that the dispatcher takes to call Python
_DERIVED = 1.25
"""The same where the figure is worked out and not measured: under a mask that skips tiles."""
_AS_ARRAY = 0.7
"""The same of decoding under a mask that torch's kernel is given as an array, made in each call.

With half of the keys padding it took 1.3 to 3.2 times as long as torch's own function does with an
array made before, where the native kernels, 0.75 to 0.94 x without a mask, were 1.09 to 1.28 x:
``polyattn bench harm --only "decode*(8,12,1x128,64)*"`` on an Intel Xeon with AMX, 2 cores.
"""


@dataclass(frozen=True)
class Figure:
    """torch's time over that of the native kernels: the typical ratio and its spread.

    `source`: where it comes from, as a reason says it.

    >>> Figure(1.1, 1.3, 1.4, "a test").prefers_native, Figure(0.9, 1.3, 1.4, "").prefers_native
    (True, False)
    """

    low: float
    median: float
    high: float
    source: str

    @property
    def prefers_native(self) -> bool:
        """Whether the native kernels are faster as a rule, and nowhere slower by more than 5 %."""
        return self.low >= _NO_HARM and self.median >= _FASTER


@dataclass(frozen=True)
class Verdict:
    """Whether the native kernels are preferred for a problem, and what that rests on.

    `ratio`: torch's time over theirs, as expected; None where nothing is known.

    >>> Verdict(True, "1.3 x torch's kernel", 1.3).prefers_native
    True
    """

    prefers_native: bool
    said: str
    ratio: float | None = None


@dataclass(frozen=True)
class Evidence:
    """What is known of one processor: figures by dtype and kind.

    `lacking`: why others are not known; `undecided`: why those are not that were tried here.
    `record`: the name of the shipped record that fits, None without one.
    """

    figures: Mapping[tuple[str, str], Figure] = field(default_factory=dict)
    lacking: str = "not measured on this processor"
    undecided: Mapping[tuple[str, str], str] = field(default_factory=dict)
    record: str | None = None

    def figure(self, problem: Problem) -> Figure | None:
        """Return what is known of problems of this dtype and kind, or of the wider one."""
        kind = kind_of(problem)
        found = self.figures.get((problem.dtype, kind))
        return found or self.figures.get((problem.dtype, WIDER.get(kind, kind)))

    def verdict(self, problem: Problem) -> Verdict | None:
        """Say which kernel is preferred; None for small problems of which nothing is known.

        >>> p = Problem(batch=1, q_len=512, kv_len=512, heads=8, kv_heads=8, head_dim=64)
        >>> known = Evidence({("float32", "short"): Figure(1.3, 1.4, 1.5, "a test")})
        >>> print(known.verdict(p).said)
        1.4 x torch's kernel on short (at most 512 keys) float32 problems (1.3 - 1.5), a test
        >>> print(known.verdict(p.with_(dtype="bfloat16")).said)
        not measured on this processor; torch's own kernel
        """
        figure = self.figure(problem)
        if problem.compiled and is_small(problem) and not trains(problem):
            return self._compiled_verdict(figure, problem)
        if is_small(problem) and figure is None:
            return None
        if is_tiny_training(problem):
            return Verdict(False, "training that is over in some 100 us; torch's own kernel")
        if figure is None:
            kind = kind_of(problem)
            wider = self.undecided.get((problem.dtype, WIDER.get(kind, kind)), self.lacking)
            why = self.undecided.get((problem.dtype, kind), wider)
            return Verdict(False, f"{why}; torch's own kernel")
        share = share_of(problem)
        measured = _said(figure, problem)
        if figure.prefers_native:
            return Verdict(True, measured, figure.median / share)
        if is_band(problem) and (figure.low >= _NO_HARM or figure.low / share >= _DERIVED):
            remain = f", at most {share:.0%} remain" if share < 1.0 else ""
            skips = f"tiles that the mask empties are skipped{remain}"
            return Verdict(True, f"{skips}; otherwise {measured}", figure.median / share)
        if is_array(problem) and "decode" in kind_of(problem) and figure.low >= _AS_ARRAY:
            made = "torch's kernel would be given the mask as an array, made in each call"
            return Verdict(True, f"{made}; otherwise {measured}", figure.median)
        return Verdict(False, f"torch's own kernel; native_cpu: {measured}", figure.median)

    def _compiled_verdict(self, figure: Figure | None, problem: Problem) -> Verdict:
        """Say it of a small call in compiled code, where our operator is called in Python."""
        sooner = "at this size compiled code calls torch's own operator sooner"
        if figure is None:
            return Verdict(False, f"{sooner}; {self.lacking}")
        measured = _said(figure, problem)
        if figure.low < _FASTER_COMPILED:
            return Verdict(False, f"{sooner}; native_cpu: {measured}", figure.median)
        return Verdict(True, measured, figure.median)


def _said(figure: Figure, problem: Problem) -> str:
    spread = f"{figure.low:.3g} - {figure.high:.3g}"
    return (
        f"{figure.median:.3g} x torch's kernel on {KINDS[kind_of(problem)]} {problem.dtype} "
        f"problems ({spread}), {figure.source}"
    )


UNMEASURED = Evidence()
"""Of a processor of which nothing is known."""
