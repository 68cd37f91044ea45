"""Ulysses: rows are exchanged for heads, so that each device has whole sequences of a few heads.

Source: Jacobs et al., *DeepSpeed Ulysses* (arXiv 2309.14509).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from polyattn.errors import InvalidProblem
from polyattn.jax.kit.axes import axis_size
from polyattn.jax.kit.own_promotion import own_promotion
from polyattn.jax.sequence_parallel.local_attention import local_attention
from polyattn.masks import And, Causal, Full, Mask, Padding, Segments, Window

__all__ = ["exchanged", "ulysses_attention"]

Array: TypeAlias = jax.Array


@own_promotion
def ulysses_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    axis_name: str = "sp",
    mask: Mask | None = None,
    sinks: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str | tuple[str, ...] | None = None,
) -> Any:
    """Compute attention over a sequence spread along a mesh axis, within ``jax.shard_map``.

    `query` (B, T / P, N, H), `key` and `value` (B, S / P, K, H): the r-th part of the sequence on
    device r of the P along `axis_name`. N is a multiple of P; K is one, or P is a multiple of K:
    then each key head goes to P / K devices. `mask`: Causal, Window, Segments (ids of these rows
    and keys) and Padding (lengths of the whole sequences), joined by ``&``. The other arguments
    are those of :func:`polyattn.jax.attention`, which computes the whole on `backend`, or on what
    it chooses.

    Returns out (B, T / P, N, V), with `return_lse` also the log-sum-exp (B, N, T / P). Raises
    :class:`~polyattn.errors.InvalidProblem` while tracing for an axis that is not there, heads
    that do not divide, and masks that cannot be spread.
    """
    inner = functools.partial(local_attention, scale=scale, softcap=softcap, backend=backend)
    out, lse = exchanged(inner, query, key, value, mask, sinks, axis_name)
    return (out, lse) if return_lse else out


def exchanged(
    attend: Callable[..., Any],
    query: Array,
    key: Array,
    value: Array,
    mask: Mask | None,
    sinks: Array | None,
    axis_name: str,
) -> tuple[Array, Array]:
    """Return (out, lse): `attend` on all rows of the axis and some heads, and back again.

    `attend` takes ``(q, k, v, mask=, sinks=, return_lse=True)``.
    """
    devices = axis_size(axis_name)
    heads, kv_heads = query.shape[2], key.shape[2]
    if heads % devices or (kv_heads % devices and devices % kv_heads):
        raise InvalidProblem(
            f"got {heads} query and {kv_heads} key/value heads over {devices} devices of "
            f"{axis_name!r}, expected {heads} to be a multiple of {devices}, and of {kv_heads} and "
            f"{devices} one of the other. Use ring_attention, which asks nothing of heads."
        )
    if kv_heads % devices:
        key, value = (jnp.repeat(x, devices // kv_heads, 2) for x in (key, value))
    q, k, v = (_heads_for_rows(x, axis_name) for x in (query, key, value))
    rank, mine = jax.lax.axis_index(axis_name), heads // devices
    if sinks is not None:
        sinks = jax.lax.dynamic_slice_in_dim(sinks, rank * mine, mine, 0)
    out, lse = attend(q, k, v, mask=_gathered(mask, axis_name), sinks=sinks, return_lse=True)
    out = jax.lax.all_to_all(out, axis_name, split_axis=1, concat_axis=2, tiled=True)
    lse = jax.lax.all_to_all(lse, axis_name, split_axis=2, concat_axis=1, tiled=True)
    return out, lse


def _heads_for_rows(x: Array, axis_name: str) -> Array:
    return jax.lax.all_to_all(x, axis_name, split_axis=2, concat_axis=1, tiled=True)


def _gathered(mask: Mask | None, axis_name: str) -> Mask | None:
    """Return the mask of the whole sequence: ids are gathered, the rest means the whole already."""
    whole: Mask | None = None
    for part in () if mask is None else mask.parts if isinstance(mask, And) else (mask,):
        if isinstance(part, Segments):
            ids = (jnp.asarray(x) for x in (part.q_ids, part.kv_ids))
            part = Segments(*(
                jax.lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True) for x in ids
            ))  # fmt: skip
        elif not isinstance(part, (Causal, Window, Padding, Full)):
            raise InvalidProblem(
                f"got {part!r} over a sequence that is spread, expected Causal, Window, Segments "
                "and Padding, joined by &; or spread heads and batch only."
            )
        whole = part if whole is None else whole & part
    return whole
