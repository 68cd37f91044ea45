"""Calls lowered to ``jax.nn.dot_product_attention``, and made exact where it is not.

Its masked rows are the mean of the values, its masks let NaN through (0 * NaN), and its causal mask
is top-left. So masks go in as booleans, rows without keys are set to 0, and what is not finite is
taken out before and put back where it is attended to, which costs something only where there is
such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from polyattn.jax.kit.layouts import grouped, joined
from polyattn.jax.kit.masking import Dims, allowed, bias_scores
from polyattn.jax.kit.nonfinite import bad_rows, finite, spread_values
from polyattn.jax.kit.seen_rows import is_tame, put_back, without_unseen
from polyattn.problem import Problem

__all__ = ["load_cudnn", "load_xla"]

Array: TypeAlias = jax.Array


def load_xla() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Return `prepare` of XLA's path, as :class:`polyattn.registry.Backend` describes it."""
    return _prepare_xla


def load_cudnn() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Return `prepare` of cuDNN's kernel."""
    return _prepare_cudnn


def _prepare_xla(problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
    def kernel(
        q: Array, k: Array, v: Array, mask: Any = None, bias: Any = None, sinks: Any = None,
        dropout_key: Any = None,
    ) -> Any:  # fmt: skip
        q, k, v = (_rows_first(x, problem.layout) for x in (q, k, v))
        dims = Dims(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1])
        wide = jnp.promote_types(q.dtype, jnp.float32)
        seen = None if mask is None else allowed(mask, dims)
        added = None if bias is None else bias_scores(bias, dims, wide)
        if added is not None:  # -inf in a bias masks
            opened = added > -jnp.inf
            seen = opened if seen is None else seen & opened
            added = jnp.where(opened, added, 0)
        if seen is not None:
            q, k, v = _hidden(q, k, v, seen, dims)
        with jax.default_matmul_precision("highest"):  # or float32 is TF32 on GPUs
            out = jax.nn.dot_product_attention(
                finite(q), finite(k), finite(v), _whole(added, dims), _whole(seen, dims),
                scale=problem.scale, implementation="xla",
            )  # fmt: skip
        if seen is not None:
            out = jnp.where(jnp.swapaxes(seen.any(-1, keepdims=True), 1, 2), out, 0)
        out = jax.lax.cond(
            jnp.isfinite(q).all() & jnp.isfinite(k).all() & jnp.isfinite(v).all(),
            lambda out: out, lambda out: _put_back(out, q, k, v, seen, dims), out,
        )  # fmt: skip
        out = out.astype(q.dtype)
        if problem.layout == "BTNH":
            return out
        return jnp.swapaxes(out, 1, 2) if problem.layout == "BNTH" else out[0]

    return kernel


def _rows_first(x: Array, layout: str) -> Array:
    if layout == "BTNH":
        return x
    return jnp.swapaxes(x, 1, 2) if layout == "BNTH" else x[None]


def _whole(x: Array | None, dims: Dims) -> Array | None:
    """Return what broadcasts to (B, N, T, S) with rows and keys there, as the function wants it."""
    return None if x is None else jnp.broadcast_to(x, (*x.shape[:2], dims.q_len, dims.kv_len))


def _hidden(q: Array, k: Array, v: Array, seen: Array, dims: Dims) -> tuple[Array, Array, Array]:
    """Zero the queries that see no key and the keys that no query sees, whatever they hold."""
    rows = jnp.swapaxes(seen.any(-1, keepdims=True), 1, 2)
    keys = seen.any(-2)
    if keys.shape[1] > 1:
        keys = grouped(keys, dims.kv_heads).any(2)
    keys = jnp.swapaxes(keys, 1, 2)[..., None]
    return jnp.where(rows, q, 0), jnp.where(keys, k, 0), jnp.where(keys, v, 0)


def _put_back(out: Array, q: Array, k: Array, v: Array, seen: Array | None, dims: Dims) -> Array:
    """Let what is not finite reach the rows that attend to it."""
    q, k, v, out = (jnp.swapaxes(x, 1, 2) for x in (q, k, v, out))
    full = (dims.batch, dims.heads, dims.q_len, dims.kv_len)
    whole = jnp.broadcast_to(jnp.ones((1, 1, 1, 1), bool) if seen is None else seen, full)
    bad = grouped(whole, dims.kv_heads) & bad_rows(k)[:, :, None, None]
    poisoned = joined(bad).any(-1) | (bad_rows(q) & whole.any(-1))
    out = jnp.where(poisoned[..., None], jnp.nan, spread_values(out, v, whole))
    return jnp.swapaxes(out, 1, 2).astype(q.dtype)


def _prepare_cudnn(problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
    def kernel(
        q: Array, k: Array, v: Array, mask: Any = None, bias: Any = None, sinks: Any = None,
        dropout_key: Any = None,
    ) -> Any:  # fmt: skip
        q, k, v = (_rows_first(x, problem.layout) for x in (q, k, v))

        def run(q: Array, k: Array, v: Array) -> Array:
            return jax.nn.dot_product_attention(
                q, k, v, scale=problem.scale, is_causal=mask is not None, implementation="cudnn"
            )

        def careful(q: Array, k: Array, v: Array) -> Array:
            q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
            q, k, v = without_unseen(q, k, v, mask)
            out = jnp.swapaxes(run(*(jnp.swapaxes(finite(x), 1, 2) for x in (q, k, v))), 1, 2)
            return jnp.swapaxes(put_back(out, None, q, k, v, mask)[0], 1, 2)

        out = jax.lax.cond(is_tame(q, k, v), run, careful, q, k, v)
        return jnp.swapaxes(out, 1, 2) if problem.layout == "BNTH" else out

    return kernel
