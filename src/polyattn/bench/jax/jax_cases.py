"""The rows of ``bench jax``. Goals are times of ``jax.nn.dot_product_attention`` over ours."""

from __future__ import annotations

import fnmatch

from polyattn.bench.cpu.cases import Case, Size, quick
from polyattn.errors import PolyattnError

__all__ = ["CASES", "LEAST", "chosen"]

LEAST = 0.95
"""What a row without a goal has to reach: nobody may lose by the automatic choice."""
_LONG, _SHORT = Size(1, 8, 8, 4096, 4096, 64), Size(2, 12, 12, 512, 512, 64)
_DECODE, _TINY = Size(1, 32, 8, 1, 32768, 128), Size(1, 8, 8, 16, 16, 64)


def _pair(
    group: str, size: Size, goals: tuple[float | None, float | None], **more: object
) -> list[Case]:
    return [
        Case(group, size, dtype, layout="BTNH", goal=goal, **more)  # type: ignore[arg-type]
        for dtype, goal in zip(("float32", "bfloat16"), goals, strict=True)
    ]


CASES: tuple[Case, ...] = (
    *_pair("dense", _LONG, (6.0, 7.0)),
    *_pair("causal", _LONG, (9.0, 9.0), mask="causal"),
    *_pair("window 256", _LONG, (35.0, 60.0), mask="window"),
    *_pair("short", _SHORT, (None, None)),
    *_pair("tiny", _TINY, (None, None)),
    *_pair("GQA prefill", Size(1, 32, 8, 2048, 2048, 64), (None, None)),
    *_pair("decode", _DECODE, (None, 25.0)),
    *_pair("fwd+bwd dense", _LONG, (4.0, 4.0), train=True),
    *_pair("fwd+bwd causal", _LONG, (None, None), mask="causal", train=True),
)


def chosen(only: str, is_quick: bool) -> list[Case]:
    """Return the cases whose name holds the pattern, or matches its wildcards."""
    found = [case for case in CASES if only in case.name or fnmatch.fnmatch(case.name, only)]
    if not found:
        names = "; ".join(case.name for case in CASES)
        raise PolyattnError(f"got --only {only!r}, expected a part of one of: {names}.")
    return [quick(case) for case in found] if is_quick else found
