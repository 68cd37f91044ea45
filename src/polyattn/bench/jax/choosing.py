"""What the choice of a backend takes while code is traced: admission, selection, preparation."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from polyattn.jax import attention
from polyattn.masks import Causal
from polyattn.selection import scopes

__all__ = ["MOST_MS", "row"]

MOST_MS = 2.0
_TIMES = 9


def row() -> dict[str, Any]:
    """Return the ms that tracing one attention takes beyond tracing its kernel's own operations.

    `new`: of a problem that is new to the process; `known`: of one that was chosen for before.
    """
    new, known = [], []
    for i in range(_TIMES):
        x = jax.ShapeDtypeStruct((1, 64 + i, 4, 32), jnp.float32)
        scopes.invalidate()
        first, again = _traced_s(x), _traced_s(x)
        new.append(first * 1e3)
        known.append(again * 1e3)
    spent = statistics.median(new) - statistics.median(known)
    return {
        "new_ms": round(statistics.median(new), 3),
        "known_ms": round(statistics.median(known), 3),
        "choice_ms": round(spent, 3),
        "goal_ms": MOST_MS,
        "met": spent <= MOST_MS,
    }


def _traced_s(x: Any) -> float:
    def call(q: Any) -> Any:  # a function of its own: JAX keeps what it traced
        return attention(q, q, q, mask=Causal())

    begin = time.perf_counter()
    jax.eval_shape(call, x)
    return time.perf_counter() - begin
