"""The definition of attention in JAX, `polyattn.jax.kit.defined_attention`; pages are gathered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyattn.jax.kit.defined_attention import defined_attention
from polyattn.masks import Dense, Index
from polyattn.problem import Problem

__all__ = ["load"]


def load() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Return `prepare`, as :class:`polyattn.registry.Backend` describes it."""
    return _prepare


def _prepare(problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
    return _plain(problem) if problem.paged is None else _paged(problem)


def _plain(problem: Problem) -> Callable[..., Any]:
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale

    def kernel(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Any = None,
        bias: Any = None,
        sinks: Any = None,
        dropout_key: Any = None,
    ) -> Any:
        out, lse = defined_attention(
            q, k, v, mask, bias, sinks, layout=problem.layout, scale=scale,
            softcap=problem.softcap, dropout_p=problem.dropout_p, dropout_key=dropout_key,
        )  # fmt: skip
        out = out.astype(q.dtype)
        return (out, lse.astype(jnp.promote_types(q.dtype, jnp.float32))) if problem.lse else out

    return kernel


def _paged(problem: Problem) -> Callable[..., Any]:
    """Gather all pages; what is past a sequence's length is masked."""
    plain = _plain(problem)

    def kernel(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Any,
        bias: Any,
        sinks: Any,
        dropout_key: Any,
        pages: Any,
    ) -> Any:
        table, lengths = pages
        k, v = (_gathered(x, table, problem.layout) for x in (k, v))
        rows_first = problem.layout == "BTNH"
        t, j = (
            jnp.arange(q.shape[1 if rows_first else 2])[:, None],
            jnp.arange(k.shape[1 if rows_first else 2]),
        )
        own, b = lengths.reshape(-1, 1, 1, 1), jnp.arange(q.shape[0]).reshape(-1, 1, 1, 1)
        seen = (j < own) & (t >= 0)
        if mask is not None:
            seen = seen & mask.allows(Index(b, 0, t, j, t.shape[0], own))
        return plain(q, k, v, Dense(seen), None, sinks)

    return kernel


def _gathered(pages: jax.Array, table: jax.Array, layout: str) -> jax.Array:
    """Return the keys of all pages of each sequence, in the layout."""
    found = jnp.take(pages, table, axis=0, mode="clip")
    if layout == "BTNH":
        return found.reshape(found.shape[0], -1, *found.shape[3:])
    found = jnp.moveaxis(found, 2, 1)
    return found.reshape(*found.shape[:2], -1, found.shape[-1])
