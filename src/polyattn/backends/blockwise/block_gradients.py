"""The backward pass: scores are computed again, tile by tile, from the log-sum-exp."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyattn.backends.blockwise.derivatives import over_all_tiles
from polyattn.backends.blockwise.score_tiles import (
    Array,
    Blocks,
    Extras,
    part,
    row_range,
    tile,
)  # fmt: skip
from polyattn.jax.kit.nonfinite import finite
from polyattn.jax.kit.varying import as_varying
from polyattn.masks.biases import Alibi, Bias

__all__ = ["Incoming", "gradients"]


class Incoming(NamedTuple):
    """What the passes before have left: grouped and padded as q is, in the wide type.

    `lse` and `delta` = sum(dout * out) - dlse are (B, K, G, T).
    """

    dout: Array
    lse: Array
    delta: Array


class _Grown(NamedTuple):
    """What all tiles add to: the gradients of q, and of the bias's array where it has one."""

    dq: Array
    dbias: Any


@over_all_tiles
def gradients(
    blocks: Blocks, extras: Extras, q: Array, k: Array, v: Array, come: Incoming
) -> tuple[Array, Array, Array, Any, Any]:
    """Return dq, dk, dv (grouped, padded, wide), and those of the bias's array and the sinks."""
    wide = come.dout.dtype
    shape = None if extras.bias is None else _four(extras.bias)
    dbias = None if shape is None else jnp.zeros(_padded(shape, blocks), wide)
    grown = as_varying(_Grown(jnp.zeros(q.shape, wide), dbias), q)

    def of_block(grown: _Grown, j: Array) -> tuple[_Grown, tuple[Array, Array]]:
        return _key_block(blocks, extras, q, part(k, j, blocks.k, 2), part(v, j, blocks.k, 2),
                          come, grown, j)  # fmt: skip

    grown, (dk, dv) = jax.lax.scan(of_block, grown, jnp.arange(blocks.of_k))
    dbias = None
    if shape is not None and extras.bias is not None:
        cut = grown.dbias[tuple(slice(0, size) for size in shape)]
        dbias = cut.reshape(extras.bias.payload.shape).astype(extras.bias.payload.dtype)
    return grown.dq, _together(dk), _together(dv), dbias, _of_sinks(extras.sinks, come)


def _together(x: Array) -> Array:
    """Return (blocks, B, K, C, ...) as (B, K, S, ...)."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


def _key_block(
    blocks: Blocks, extras: Extras, q: Array, k: Array, v: Array, come: Incoming, grown: _Grown,
    j: Array,
) -> tuple[_Grown, tuple[Array, Array]]:  # fmt: skip
    wide, clean_k, clean_v = come.dout.dtype, finite(k), finite(v)

    def step(i: Array, held: tuple[_Grown, Array, Array]) -> tuple[_Grown, Array, Array]:
        grown, dk, dv = held
        q_i, dout, lse, delta = (
            part(x, i, blocks.q, 3) for x in (q, come.dout, come.lse, come.delta)
        )
        found = tile(blocks, extras, q_i, k, i, j)
        level = jnp.where(lse == -jnp.inf, 0, lse)[..., None]
        weights = jnp.where(found.seen, jnp.exp(found.scores - level), 0)
        dweights = _product("bkgtv,bksv->bkgts", dout, clean_v.astype(wide))
        dscores = jnp.where(found.seen, weights * (dweights - delta[..., None]), 0)
        dbias = _add_bias(blocks, extras.bias, grown.dbias, dscores, i, j)
        if found.slope is not None:
            dscores = jnp.where(found.seen, dscores * found.slope, 0)
        dscores = dscores * jnp.asarray(blocks.scale, wide)
        dq_i = part(grown.dq, i, blocks.q, 3)
        dq_i += _product("bkgts,bksh->bkgth", dscores, clean_k.astype(wide))
        dk += _product("bkgts,bkgth->bksh", dscores, finite(q_i).astype(wide))
        dv += _product("bkgts,bkgtv->bksv", weights, dout)
        dq = jax.lax.dynamic_update_slice_in_dim(grown.dq, dq_i, i * blocks.q, 3)
        return _Grown(dq, dbias), dk, dv

    held = as_varying((grown, jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)), q)
    grown, dk, dv = jax.lax.fori_loop(*row_range(blocks, extras.mask, j), step, held)
    return grown, (dk, dv)


def _product(what: str, a: Array, b: Array) -> Array:
    return jnp.einsum(what, a, b, precision="highest")


def _four(bias: Bias) -> tuple[int, int, int, int]:
    """Return the sizes of a bias's array as (B|1, N|1, T|1, S|1); slopes are (B|1, N, 1, 1)."""
    shape = tuple(bias.payload.shape)
    if isinstance(bias, Alibi):
        return (shape[0] if len(shape) == 2 else 1, shape[-1], 1, 1)
    return (1,) * (4 - len(shape)) + shape


def _padded(shape: tuple[int, int, int, int], blocks: Blocks) -> tuple[int, ...]:
    b, n, t, s = shape
    return (
        b, n, blocks.of_q * blocks.q if t > 1 else 1, blocks.of_k * blocks.k if s > 1 else 1,
    )  # fmt: skip


def _add_bias(
    blocks: Blocks, bias: Bias | None, grown: Any, dscores: Array, i: Array, j: Array
) -> Any:
    """Add a tile's part of the gradient, summed over what the bias is shared over."""
    if bias is None:
        return None
    each = dscores.reshape(dscores.shape[0], -1, *dscores.shape[3:])  # (B, N, R, C)
    if isinstance(bias, Alibi):
        rows, columns = i * blocks.q + jnp.arange(blocks.q), j * blocks.k + jnp.arange(blocks.k)
        shift = blocks.dims.kv_len - blocks.dims.q_len
        each = -each * jnp.abs(rows[:, None] + shift - columns).astype(each.dtype)
    shared = [axis for axis, size in enumerate(_four(bias)) if size == 1]
    each = each.sum(shared, keepdims=True) if shared else each
    begin = [0, 0, 0 if 2 in shared else i * blocks.q, 0 if 3 in shared else j * blocks.k]
    old = jax.lax.dynamic_slice(grown, begin, each.shape)
    return jax.lax.dynamic_update_slice(grown, old + each, begin)


def _of_sinks(sinks: Any, come: Incoming) -> Any:
    """Return -sum over queries of exp(sink - lse) * delta, in the shape and dtype of the sinks."""
    if sinks is None:
        return None
    lse, wide = come.lse, come.lse.dtype
    logits = sinks.astype(wide).reshape(*lse.shape[1:3], -1)

    def one(logit: Array) -> Array:  # a sink at a time: no array larger than the lse
        shares = jnp.where(lse == -jnp.inf, 0, jnp.exp(logit[None, :, :, None] - lse))
        return -(shares * come.delta).sum((0, 3))

    total = jnp.stack([one(logits[..., m]) for m in range(logits.shape[-1])], -1)
    return total.reshape(sinks.shape).astype(sinks.dtype)
