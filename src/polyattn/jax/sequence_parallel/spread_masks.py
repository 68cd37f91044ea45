"""Masks of a whole sequence, as what one device's rows and another's keys see of them."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from polyattn.errors import InvalidProblem
from polyattn.masks import And, Causal, Dense, Full, Mask, Padding, Segments, Window

__all__ = ["EMPTY", "Spread", "Whole", "local_bands", "spread"]

Array: TypeAlias = jax.Array
EMPTY = "empty"
"""Stands for a pair of chunks of which nothing is seen."""


class Spread(NamedTuple):
    """A mask in parts. `low`, `high`: the band of keys around a query, None for no bound.

    `q_ids`, `kv_ids`: of this device's rows and keys, (L,) or (B, L); `q_lengths`, `kv_lengths`:
    of the whole sequence, (B,).
    """

    low: int | None
    high: int | None
    q_ids: Any
    kv_ids: Any
    q_lengths: Any
    kv_lengths: Any


class Whole(NamedTuple):
    """How a sequence is spread; hashable. `chunk`: rows of one; `chunks`: of one device."""

    devices: int
    chunk: int
    chunks: int


def spread(mask: Mask | None) -> Spread:
    """Take a mask apart; raise :class:`InvalidProblem` for what cannot be spread.

    Causal, Window, Segments (ids of the local rows and keys) and Padding (lengths of the whole)
    joined by ``&`` can.
    """
    low: int | None = None
    high: int | None = None
    found: dict[str, Any] = {}
    for part in () if mask is None else mask.parts if isinstance(mask, And) else (mask,):
        if isinstance(part, (Causal, Window)):
            least, most = part.band or (None, None)
            low = least if low is None else low if least is None else max(low, least)
            high = most if high is None else high if most is None else min(high, most)
        elif isinstance(part, Segments) and "q_ids" not in found:
            found |= {"q_ids": part.q_ids, "kv_ids": part.kv_ids}
        elif isinstance(part, Padding) and "kv_lengths" not in found:
            found |= {"q_lengths": part.q_lengths, "kv_lengths": part.kv_lengths}
        elif not isinstance(part, Full):
            raise InvalidProblem(
                f"got {part!r} over a sequence that is spread, expected Causal, Window, Segments "
                "and Padding, joined by &, each once; or spread heads and batch only."
            )
    names = ("q_ids", "kv_ids", "q_lengths", "kv_lengths")
    arrays = (None if found.get(n) is None else jnp.asarray(found[n]) for n in names)
    return Spread(low, high, *arrays)


def local_bands(whole: Whole, low: int | None, high: int | None) -> list[Any]:
    """Return what a chunk of rows sees of the chunk of keys `d` further on, for d = -n .. n.

    For each of the 2n + 1 distances: EMPTY, None (all of it) or a mask; n + 1 chunks there are.
    """
    chunk, last = whole.chunk, whole.devices * whole.chunks - 1
    return [_band_at(chunk, d * chunk, low, high) for d in range(-last, last + 1)]


def _band_at(chunk: int, shift: int, low: int | None, high: int | None) -> Any:
    """Return what is seen where keys lie `shift` further on than rows: low <= j + shift - t."""
    least = None if low is None else low - shift
    most = None if high is None else high - shift
    if (least is not None and least > chunk - 1) or (most is not None and most < 1 - chunk):
        return EMPTY
    least = None if least is None or least <= 1 - chunk else least
    most = None if most is None or most >= chunk - 1 else most
    if least is None and most is None:
        return None
    if most == 0 and least is None:
        return Causal()
    if (least is None or least <= 0) and (most is None or most >= 0):
        return Window(left=None if least is None else -least, right=most)
    steps = jnp.arange(chunk) - jnp.arange(chunk)[:, None]
    seen = jnp.ones((chunk, chunk), bool) if least is None else steps >= least
    return Dense(seen if most is None else seen & (steps <= most))
