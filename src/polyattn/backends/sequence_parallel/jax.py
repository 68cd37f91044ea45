"""Calls of the front whose sequence is spread, to the functions that compute it.

The one place where a backend calls the front: what each device computes is a call of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from polyattn.jax.kit.spread_sequence import SpreadSequence
from polyattn.jax.sequence_parallel.hybrid import hybrid_attention
from polyattn.jax.sequence_parallel.ring import ring_attention
from polyattn.jax.sequence_parallel.ulysses import ulysses_attention
from polyattn.problem import Problem

__all__ = ["load_hybrid", "load_ring", "load_ulysses"]

Prepare = Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]


def load_ring() -> Prepare:
    """Return `prepare` of the ring, as :class:`polyattn.registry.Backend` describes it."""
    return functools.partial(_prepare, ring_attention)


def load_ulysses() -> Prepare:
    """Return `prepare` of Ulysses."""
    return functools.partial(_prepare, ulysses_attention)


def load_hybrid() -> Prepare:
    """Return `prepare` of both in one."""
    return functools.partial(_prepare, hybrid_attention)


def _prepare(
    function: Callable[..., Any], problem: Problem, config: Mapping[str, Any]
) -> Callable[..., Any]:
    spread = SpreadSequence.parse(problem.spread or "")
    axes = tuple(name for name, _ in spread.axes)
    options: dict[str, Any] = {"axis_name": axes[0] if len(axes) == 1 else axes}
    if function is not ulysses_attention:
        options["balance"] = spread.balance

    def kernel(
        q: Any, k: Any, v: Any, mask: Any = None, bias: Any = None, sinks: Any = None,
        dropout_key: Any = None,
    ) -> Any:  # fmt: skip
        if problem.layout == "BNTH":
            q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        out, lse = function(
            q, k, v, mask=mask, sinks=sinks, scale=problem.scale, softcap=problem.softcap,
            return_lse=True, backend=spread.local or None, **options,
        )  # fmt: skip
        out = jnp.swapaxes(out, 1, 2) if problem.layout == "BNTH" else out
        return (out, lse) if problem.lse else out

    return kernel
