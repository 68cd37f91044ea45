"""Few queries over keys that lie in parts on several devices: each its own part, then one sum.

Queries are whole on each device, keys stay where they are. The partial results are joined by their
log-sum-exp, as those of the splits of one device are (Dao et al., *Flash-Decoding*, 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from polyattn.jax.kit.layouts import from_bnth, to_bnth
from polyattn.jax.kit.masking import Dims, allowed, bias_scores, bind_mask
from polyattn.jax.sharding.axes import Axis
from polyattn.masks import And, Causal, Dense, Mask, Padding
from polyattn.masks.biases import Alibi, Bias, DenseBias

__all__ = ["over_split_keys"]

Array: TypeAlias = jax.Array


def over_split_keys(
    attend: Callable[..., Any],
    q: Array,
    k: Array,
    v: Array,
    *,
    axis: Axis,
    devices: int,
    mask: Mask | None,
    bias: Bias | None,
    sinks: Array | None,
    layout: str,
    **options: Any,
) -> tuple[Array, Array]:
    """Return (out, lse) over the keys of all devices along `axis`, within ``jax.shard_map``.

    `k` and `v` are this device's part, in order; `mask` and `bias` are those of all keys. `attend`
    gives (out, lse) of a part, and gets no sinks: they count once.
    """
    q4, k4 = to_bnth(q, layout), to_bnth(k, layout)
    mine = Dims.of(q4, k4)
    whole = mine._replace(kv_len=mine.kv_len * devices)
    first = jax.lax.axis_index(axis) * mine.kv_len
    columns = first + jnp.arange(mine.kv_len)
    out, lse = attend(
        q, k, v, mask=_part_of_mask(mask, whole, mine.kv_len, first),
        bias=None if bias is None else _part_of_bias(bias, whole, columns),
        sinks=None, layout=layout, **options,
    )  # fmt: skip
    top = jax.lax.pmax(jax.lax.stop_gradient(lse), axis)
    logits = None
    if sinks is not None:
        logits = jax.nn.logsumexp(sinks.astype(lse.dtype).reshape(sinks.shape[0], -1), -1)[:, None]
        top = jnp.maximum(top, jax.lax.stop_gradient(logits))  # which may be above every score
    level = jnp.where(top == -jnp.inf, 0, top)
    share = jnp.exp(lse - level)
    total = jax.lax.psum(share, axis)
    if logits is not None:
        total = total + jnp.exp(logits - level)
    rows = to_bnth(out, layout).astype(lse.dtype)
    part = jnp.where(share[..., None] == 0, 0, rows * share[..., None])
    known = jnp.where(total == 0, 1, total)
    joined = jax.lax.psum(part, axis) / known[..., None]
    lse = jnp.where(total == 0, -jnp.inf, jnp.log(known) + level)
    return from_bnth(joined.astype(out.dtype), layout), lse


def _part_of_mask(mask: Mask | None, whole: Dims, count: int, first: Array) -> Mask | None:
    """Return what rows see of the keys `first` and on: lengths stay lengths, the rest is told.

    A row alone, the last of its sequence, sees all that is before it.
    """
    if mask is None:
        return None
    mask = bind_mask(mask)
    lengths: list[Mask] = []
    others: Mask | None = None
    for part in mask.parts if isinstance(mask, And) else (mask,):
        if isinstance(part, Padding):
            kv = None if part.kv_lengths is None else jnp.clip(part.kv_lengths - first, 0, count)
            lengths.append(Padding(part.q_lengths, kv))
        elif not (isinstance(part, Causal) and whole.q_len == 1 and part.align != "top_left"):
            others = part if others is None else others & part
    if others is not None:
        lengths.append(Dense(allowed(others, whole, columns=first + jnp.arange(count))))
    joined: Mask | None = None
    for part in lengths:
        joined = part if joined is None else joined & part
    return joined


def _part_of_bias(bias: Bias, whole: Dims, columns: Array) -> Bias:
    # distances of Alibi are whole numbers, which half types do not hold above 256
    dtype = jnp.promote_types(bias.payload.dtype, jnp.float32)
    dtype = dtype if isinstance(bias, Alibi) else bias.payload.dtype
    return DenseBias(bias_scores(bias, whole, dtype, columns=columns))
