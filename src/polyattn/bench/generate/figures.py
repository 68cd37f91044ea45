"""From the turns of the sides to figures, and whether they meet the goal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyattn.bench.generate.generated import Row
from polyattn.bench.generate.sides import Generated
from polyattn.bench.generate.worker import Answers, Turn
from polyattn.bench.trace.overhead_timing import summary

__all__ = ["MOST_NOISE", "agreement", "figures"]

MOST_NOISE = 0.1
"""How far stock may be from itself in a row that is judged."""
_WARM_UP = 2  # the prefill, and a block during which calls are recorded
_CLOCKS = ("wall", "processor")
_MOST_RMS = {"float32": 1e-4, "bfloat16": 0.05}


def figures(row: Row, found: Generated) -> dict[str, Any]:
    """Return the row of the record. Ratios are the mean of both stocks over ours: > 1 is faster."""
    token = {side: {c: _per_token(t, c) for c in _CLOCKS} for side, t in found.turns.items()}
    stock = {c: _means(token["stock"][c], token["again"][c]) for c in _CLOCKS}
    themselves = {c: summary(_over(token["stock"][c], token["again"][c])) for c in _CLOCKS}
    ratio = {c: summary(_over(stock[c], token["polyattn"][c])) for c in _CLOCKS}
    noise = {c: _noise(themselves[c]) for c in _CLOCKS}
    agreed = agreement(row, found.answers["stock"], found.answers["polyattn"])
    return {
        "name": row.name, "goal": row.goal, "threads": found.answers["polyattn"].threads,
        "token_ms": {s: {c: _ms(token[s][c]) for c in _CLOCKS} for s in token},
        "ratio": ratio, "stock_over_itself": themselves, "noise": noise,
        "as_run": {c: summary(_over(stock[c], token["run"][c])) for c in _CLOCKS}
        if "run" in token else None,
        "relative": summary(_over(token["polyattn"]["wall"], stock["wall"])),
        "prefill": {c: _prefill(found, c) for c in _CLOCKS},
        "attention_share": _round(found.answers["again"].share),
        "ran": found.answers["polyattn"].ran,
        "agreement": agreed, "foreign": _round(found.foreign),
        "met": _met(row, ratio, noise, agreed),
    }  # fmt: skip


def _per_token(turns: Sequence[Turn], clock: str) -> list[float]:
    return [getattr(turn, clock) / turn.tokens for turn in turns[_WARM_UP:]]


def _means(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [(a + b) / 2 for a, b in zip(one, other, strict=True)]


def _over(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(one, other, strict=True)]


def _noise(themselves: Mapping[str, float]) -> float:
    """Return how far stock is from itself: its median, or half the width of where that lies."""
    half = (themselves["high"] - themselves["low"]) / 2
    return round(max(abs(themselves["median"] - 1), half), 4)


def _ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def _prefill(found: Generated, clock: str) -> dict[str, float]:
    """Return stock over ours for the prefill, once, and stock over itself."""
    one, again, ours = (
        getattr(found.turns[side][0], clock) for side in ("stock", "again", "polyattn")
    )
    return {"ratio": round((one + again) / 2 / ours, 3), "stock_over_itself": round(one / again, 3)}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _met(
    row: Row,
    ratio: Mapping[str, Mapping[str, float]],
    noise: Mapping[str, float],
    agreed: Mapping[str, Any],
) -> bool | None:
    """Say whether the goal is met on both clocks; None where stock differs too much from itself."""
    if agreed["wrong"]:
        return False
    if max(noise.values()) > MOST_NOISE:
        return None
    return all(ratio[c]["median"] * (1 + noise[c]) >= row.goal for c in _CLOCKS)


def agreement(row: Row, stock: Answers, ours: Answers) -> dict[str, Any]:
    """Compare what both computed, from the same tokens on.

    In float32 each side goes on with its own best tokens, which have to be the same; where they
    part, only what lies before is compared. In bfloat16 both are given the same tokens.
    """
    pairs = enumerate(zip(stock.tokens, ours.tokens, strict=True))
    parted = next((number for number, (a, b) in pairs if a != b), None)
    compared = len(stock.tokens) if row.dtype != "float32" or parted is None else parted + 1
    a, b = stock.logits[:compared], ours.logits[:compared]
    scale = float(a.std())
    rms, largest = float(np.sqrt(((a - b) ** 2).mean())), float(np.abs(a - b).max())
    wrong = ""
    if not math.isfinite(rms) or rms > _MOST_RMS[row.dtype] * scale:
        wrong = f"logits differ by {rms / scale:.1e} of their spread"
    elif row.dtype == "float32" and parted is not None and not _is_tie(a[-1], 2 * largest):
        wrong = f"another token at {parted}"
    return {
        "parted_at": parted,
        "rms": float(f"{rms / scale:.3g}"),
        "largest": float(f"{largest / scale:.3g}"),
        "wrong": wrong,
    }


def _is_tie(logits: Any, within: float) -> bool:
    """Say whether a text's two best tokens are so near that rounding may choose."""
    best = np.sort(logits, axis=-1)
    return bool((best[..., -1] - best[..., -2] <= within).any())
