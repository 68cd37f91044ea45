"""Keys in pages: some pages of each sequence at a time are gathered, never the whole cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyattn.backends.blockwise.online_softmax import Sums, add, finish, nothing
from polyattn.backends.blockwise.score_tiles import Array, scored
from polyattn.jax.kit.layouts import from_bnth, grouped, joined, to_bnth
from polyattn.masks import Index, Mask
from polyattn.problem import Problem

__all__ = ["load"]

_KEYS = 1024  # gathered at once, of each sequence


def load() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Return `prepare` for paged keys, as :class:`polyattn.registry.Backend` describes it."""
    return _prepare


def _prepare(problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    most = int(config.get("keys", _KEYS))

    def kernel(
        q: Array, k: Array, v: Array, mask: Any = None, bias: Any = None, sinks: Any = None,
        dropout_key: Any = None, pages: Any = None,
    ) -> Any:  # fmt: skip
        table, lengths = pages
        page = k.shape[1 if problem.layout == "BTNH" else 2]
        once = max(1, min(most // page, table.shape[1]))
        table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % once)))
        queries = to_bnth(q, problem.layout)
        kv_heads = k.shape[2 if problem.layout == "BTNH" else 1]
        queries = grouped(queries, kv_heads)

        def step(j: Array, sums: Sums) -> Sums:
            some = jax.lax.dynamic_slice_in_dim(table, j * once, once, 1)
            keys, values = (_gathered(x, some, problem.layout) for x in (k, v))
            columns = j * once * page + jnp.arange(once * page)
            seen = _seen(mask, queries.shape[3], lengths, columns)[:, :, None]
            return add(sums, scored(queries, keys, seen, None, scale, problem.softcap), values)

        blocks = jnp.minimum(-(-lengths.max() // (once * page)), table.shape[1] // once)
        sums = jax.lax.fori_loop(0, blocks, step, nothing(queries, v.shape[-1]))
        out, lse = finish(sums, sinks)
        out = from_bnth(joined(out).astype(q.dtype), problem.layout)
        return (out, joined(lse)) if problem.lse else out

    return kernel


def _gathered(pages: Array, some: Array, layout: str) -> Array:
    """Return the keys of some pages of each sequence, (B, K, C, H)."""
    found = jnp.take(pages, some, axis=0, mode="clip")  # what names no page is past a length
    found = jnp.moveaxis(found, 3 if layout == "BTNH" else 2, 1)
    return found.reshape(*found.shape[:2], found.shape[2] * found.shape[3], found.shape[4])


def _seen(mask: Mask | None, rows: int, lengths: Array, columns: Array) -> Array:
    """Return which keys are seen, (B, 1, R, C); masks are measured on each sequence's length."""
    b, t = jnp.arange(lengths.shape[0]).reshape(-1, 1, 1, 1), jnp.arange(rows)[:, None]
    own = lengths.reshape(-1, 1, 1, 1)
    seen = (columns < own) & (t >= 0)
    if mask is None:
        return seen
    return seen & mask.allows(Index(b, 0, t, columns, rows, own))
