"""A call as an engine gets it, and what it gives back. NumPy alone is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Call", "Prepared", "Unable"]


class Unable(Exception):
    """The engine cannot run this call; the text says why."""


@dataclass(frozen=True)
class Call:
    """Attention, forward.

    `q` (B, N, T, H), `k` and `v` (B, K, S, H), or heads third if `layout` is BTNH. bfloat16 comes
    as uint16, the bits of it. `mask`: none, causal, window, blocks, padding or "causal padding";
    `allowed`: the same as booleans that broadcast to (B, N, T, S), None where nothing is masked.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dtype: str
    layout: str
    mask: str
    window: int
    allowed: np.ndarray | None
    threads: int

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], told: Mapping[str, Any]) -> Call:
        """Return the call that the parent has described."""
        return cls(
            arrays["q"], arrays["k"], arrays["v"], told["dtype"], told["layout"], told["mask"],
            told["window"], arrays.get("allowed"), told["threads"],
        )  # fmt: skip

    @property
    def scale(self) -> float:
        """1 over the square root of H."""
        return float(self.q.shape[-1]) ** -0.5

    @property
    def group(self) -> int:
        """Query heads on one key head."""
        heads = 1 if self.layout == "BNTH" else 2
        return self.q.shape[heads] // self.k.shape[heads]

    @property
    def folds(self) -> bool:
        """Whether the heads of a group may stand as query rows: one query, nothing masked."""
        rows = self.q.shape[2 if self.layout == "BNTH" else 1]
        return self.group > 1 and rows == 1 and self.allowed is None

    @property
    def folded(self) -> tuple[int, int, int, int]:
        """The shape of q then, (B, K, N / K, H); in memory it is the same."""
        heads = self.k.shape[1 if self.layout == "BNTH" else 2]
        return self.q.shape[0], heads, self.group, self.q.shape[-1]

    def need(self, what: bool, otherwise: str) -> None:
        """Raise :class:`Unable` unless it is true."""
        if not what:
            raise Unable(otherwise)

    def added(self) -> np.ndarray | None:
        """Return the mask as float32 numbers to add, 0 and -inf."""
        if self.allowed is None:
            return None
        return np.where(self.allowed, np.float32(0), np.float32(-np.inf))


@dataclass(frozen=True)
class Prepared:
    """What is timed, and how its result becomes an array of the shape of q, float32 or uint16."""

    run: Callable[[], Any]
    answer: Callable[[Any], np.ndarray]
