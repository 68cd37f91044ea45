"""Splash attention behind our call: masks as its masks and ids, rows without keys, NaN.

It wants scaled queries, lengths in blocks of 128, and rows that all see a key. Lengths and segments
become its segment ids; rows that see nothing are set to 0 after it.
Source: ``jax.experimental.pallas.ops.tpu.splash_attention``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from polyattn.jax.kit.layouts import from_bnth, grouped, joined, to_bnth
from polyattn.jax.kit.masking import Dims
from polyattn.jax.kit.nonfinite import finite
from polyattn.jax.kit.seen_rows import is_tame, put_back, rows_that_see, without_unseen
from polyattn.masks import And, Mask, Padding, Segments
from polyattn.problem import Problem

__all__ = ["load"]

Array: TypeAlias = jax.Array
_UNIT = 128
_NO_KEY, _NO_ROW = -(1 << 31), -(1 << 31) + 1
"""Ids of what is past a length: no user of ids counts from there."""


class _Static(NamedTuple):
    """What a call is beside its arrays."""

    scale: float
    softcap: float | None
    lse: bool
    block: int
    interpret: bool


def load() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Return `prepare`, as :class:`polyattn.registry.Backend` describes it."""
    return _prepare


def _prepare(problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    block, interpret = int(config.get("block", 512)), problem.device == "cpu"
    static = _Static(scale, problem.softcap, problem.lse, block, interpret)

    def kernel(
        q: Array, k: Array, v: Array, mask: Any = None, bias: Any = None, sinks: Any = None,
        dropout_key: Any = None,
    ) -> Any:  # fmt: skip
        q, k, v = (to_bnth(x, problem.layout) for x in (q, k, v))
        run = functools.partial(_attend, static, mask, sinks)
        out, lse = jax.lax.cond(
            is_tame(q, k, v), run, functools.partial(_careful, run, mask), q, k, v
        )
        out = from_bnth(out, problem.layout)
        return (out, lse) if problem.lse else out

    return kernel


def _careful(run: Callable[..., Any], mask: Mask | None, q: Array, k: Array, v: Array) -> Any:
    q, k, v = without_unseen(q, k, v, mask)
    out, lse = run(finite(q), finite(k), finite(v))
    return put_back(out, lse, q, k, v, mask)


def _attend(
    static: _Static, mask: Mask | None, sinks: Any, q: Array, k: Array, v: Array
) -> tuple[Array, Any]:
    """Return out (B, N, T, V), and lse (B, N, T) if it is asked for."""
    dims = Dims.of(q, k)
    ids = _ids(mask, dims)
    kernel = _kernel(static, mask, dims)
    kv_heads = k.shape[1]
    logits = None
    if sinks is not None:
        logits = jax.nn.logsumexp(sinks.astype(jnp.float32).reshape(dims.heads, -1), -1)
        logits = logits.reshape(kv_heads, -1)
    scaled = (q * jnp.asarray(static.scale, jnp.float32)).astype(q.dtype)
    arrays = (grouped(_whole(scaled), kv_heads), _whole(k), _whole(v))
    splash = _splash().splash_attention_kernel

    def one(q: Array, k: Array, v: Array, logits: Any, ids: Any) -> Any:
        return kernel(q, k, v, None if ids is None else splash.SegmentIds(*ids), logits)

    found = jax.vmap(jax.vmap(one, (0, 0, 0, 0, None)), (0, 0, 0, None, 0))(*arrays, logits, ids)
    out, lse = (found[0], found[1][0]) if static.lse else (found, None)
    out, lse = joined(out), None if lse is None else joined(lse)
    out, lse = out[:, :, : dims.q_len], None if lse is None else lse[:, :, : dims.q_len]
    if sinks is not None or mask is None:
        return out, lse
    seeing = rows_that_see(mask, dims)
    out = jnp.where(seeing[:, None, :, None], out, 0)
    return out, None if lse is None else jnp.where(seeing[:, None], lse, -jnp.inf)


def _splash() -> Any:
    return importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention")


def _whole(x: Array) -> Array:
    """Fill up the rows of (B, N, rows, H) to whole units."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % _UNIT), (0, 0)))


def _kernel(static: _Static, mask: Mask | None, dims: Dims) -> Any:
    """Return the kernel of the static part of a mask: a band around each row's own key.

    It is of one key head and its group: JAX's kernel of several groups divides numbers of 32 bits
    by numbers of 64 where `jax_enable_x64` is set, which it refuses.
    """
    splash = _splash()
    low, high = _band(mask)
    lengths = tuple(-(-length // _UNIT) * _UNIT for length in (dims.q_len, dims.kv_len))
    top_left = mask is not None and mask.align == "top_left"
    shift = 0 if top_left else dims.kv_len - dims.q_len
    if low is None and high is None:
        one: Any = splash.splash_attention_mask.FullMask(lengths)
    else:
        sides = (None if low is None else -low, high)
        one = splash.splash_attention_mask.LocalMask(lengths, sides, shift)
    q, k = (next(b for b in (static.block, 256, _UNIT) if not n % b) for n in lengths)
    sizes = splash.splash_attention_kernel.BlockSizes(
        block_q=q, block_kv=k, block_kv_compute=k, block_q_dkv=q, block_kv_dkv=k,
        block_kv_dkv_compute=k, block_q_dq=q, block_kv_dq=k,
    )  # fmt: skip
    return splash.splash_attention_kernel.make_splash_mqa(
        splash.splash_attention_mask.MultiHeadMask([one] * (dims.heads // dims.kv_heads)),
        block_sizes=sizes, save_residuals=static.lse, attn_logits_soft_cap=static.softcap,
        head_shards=1, q_seq_shards=1, interpret=static.interpret,
    )  # fmt: skip


def _band(mask: Mask | None) -> tuple[int | None, int | None]:
    """Return the least and the greatest key that is seen, from the row's own."""
    low: int | None = None
    high: int | None = None
    for part in _parts(mask):
        least, most = part.band or (None, None)
        low = least if low is None else low if least is None else max(low, least)
        high = most if high is None else high if most is None else min(high, most)
    return low, high


def _parts(mask: Mask | None) -> tuple[Mask, ...]:
    return () if mask is None else mask.parts if isinstance(mask, And) else (mask,)


def _ids(mask: Mask | None, dims: Dims) -> tuple[Array, Array] | None:
    """Return the ids of rows and keys, (B, whole T) and (B, whole S); None where all see all."""
    rows, keys = (jnp.arange(-(-n // _UNIT) * _UNIT)[None] for n in (dims.q_len, dims.kv_len))
    q_ids, k_ids = jnp.zeros_like(rows), jnp.where(keys < dims.kv_len, 0, _NO_KEY)
    needed = dims.kv_len % _UNIT != 0
    for part in _parts(mask):
        if isinstance(part, Segments):
            needed = True
            given = (jnp.atleast_2d(jnp.asarray(x, jnp.int32)) for x in (part.q_ids, part.kv_ids))
            fills = (_NO_ROW, _NO_KEY)
            q_ids, k_ids = (
                jnp.pad(x, ((0, 0), (0, -x.shape[1] % _UNIT)), constant_values=fill)
                for x, fill in zip(given, fills, strict=True)
            )
    for part in _parts(mask):
        if isinstance(part, Padding):
            needed = True
            if part.q_lengths is not None:
                q_ids = jnp.where(rows < jnp.asarray(part.q_lengths)[:, None], q_ids, _NO_ROW)
            if part.kv_lengths is not None:
                k_ids = jnp.where(keys < jnp.asarray(part.kv_lengths)[:, None], k_ids, _NO_KEY)
    if not needed:
        return None
    q_ids, k_ids = (jnp.broadcast_to(x, (dims.batch, x.shape[1])) for x in (q_ids, k_ids))
    return q_ids, k_ids
