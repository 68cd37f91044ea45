"""The definition of attention in JAX, in float64 where ``jax_enable_x64`` is set, else float32.

    s = scale * (q . k);  s = cap * tanh(s / cap);  s = s + bias;  s = -inf where masked
    lse = log(sum_j exp(s_j) + sum_m exp(sink_m));  out = sum_j exp(s_j - lse) v_j

It materialises the (B, N, T, S) scores; products are of the highest precision of the device. A NaN
or an infinity reaches exactly the rows that attend to it, in outputs and in gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyattn.jax.kit.layouts import from_bnth, grouped, joined, lse_from_bnt, to_bnth
from polyattn.jax.kit.masking import Dims, allowed, bias_scores
from polyattn.jax.kit.nonfinite import bad_rows, finite, spread_values
from polyattn.masks import Dense, Index
from polyattn.problem import Problem

__all__ = ["load", "reference_attention"]


def load() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Return `prepare`, as :class:`polyattn.registry.Backend` describes it."""
    return _prepare


def _prepare(problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
    return _plain(problem) if problem.paged is None else _paged(problem)


def _plain(problem: Problem) -> Callable[..., Any]:
    def kernel(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Any = None,
        bias: Any = None,
        sinks: Any = None,
        dropout_key: Any = None,
    ) -> Any:
        out, lse = reference_attention(problem, q, k, v, mask, bias, sinks, dropout_key)
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


def reference_attention(
    problem: Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Any = None,
    bias: Any = None,
    sinks: Any = None,
    dropout_key: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Return out in the layout and lse (B, N, T), both in the widest type that JAX has here."""
    wide = jax.dtypes.canonicalize_dtype(jnp.float64)
    q, k, v = (to_bnth(x, problem.layout).astype(wide) for x in (q, k, v))
    dims = Dims.of(q, k)
    seen = jnp.ones((1, 1, 1, 1), bool) if mask is None else allowed(mask, dims)
    seen = jnp.broadcast_to(seen, (dims.batch, dims.heads, dims.q_len, dims.kv_len))
    poisoned = bad_rows(q)[..., None] | joined(
        jnp.broadcast_to(
            bad_rows(k)[:, :, None, None, :],
            (dims.batch, dims.kv_heads, dims.heads // dims.kv_heads, 1, dims.kv_len),
        )
    )
    scores = _scores(problem, finite(q), finite(k), seen)
    if bias is not None:
        scores = scores + bias_scores(bias, dims, wide)
    scores = jnp.where(poisoned, jnp.nan, scores)
    weights, lse = _softmax(jnp.where(seen, scores, -jnp.inf), sinks)
    weights = jnp.where(seen, weights, 0)  # where all of a row is NaN, so are these
    if problem.dropout_p > 0:
        kept = jax.random.bernoulli(dropout_key, 1 - problem.dropout_p, weights.shape)
        weights = jnp.where(kept, weights / max(1 - problem.dropout_p, 1e-30), 0)
    out = jnp.matmul(grouped(weights, dims.kv_heads), finite(v)[:, :, None], precision="highest")
    out = spread_values(joined(out), v, seen)
    return from_bnth(out, problem.layout), lse_from_bnt(lse, problem.layout)


def _scores(problem: Problem, q: jax.Array, k: jax.Array, seen: jax.Array) -> jax.Array:
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    heads = grouped(q, k.shape[1])
    scores = joined(jnp.matmul(heads, k[:, :, None].swapaxes(-1, -2), precision="highest")) * scale
    if problem.softcap is None:
        return scores
    scores = jnp.where(seen, scores, 0)  # huge ones that nobody sees overflow
    return problem.softcap * jnp.tanh(scores / problem.softcap)


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return the weights and the lse; rows without keys have weights 0, lse -inf or the sinks'."""
    whole = scores
    if sinks is not None:
        logits = sinks.astype(scores.dtype).reshape(1, scores.shape[1], 1, -1)
        each = jnp.broadcast_to(logits, (*scores.shape[:3], logits.shape[-1]))
        whole = jnp.concatenate([scores, each], -1)
    peak = jax.lax.stop_gradient(whole.max(-1, keepdims=True))
    peak = jnp.where(peak == -jnp.inf, 0, peak)
    total = jnp.exp(whole - peak).sum(-1, keepdims=True)
    nothing = total == 0
    total = jnp.where(nothing, 1, total)
    lse = jnp.where(nothing, -jnp.inf, jnp.log(total) + peak)
    return jnp.exp(scores - peak) / total, lse[..., 0]
