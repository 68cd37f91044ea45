"""Blockwise attention as a backend: memory O(T), forward and backward, every mask.

Reverse mode is the rule of `block_gradients`, of which derivatives can be taken again. Forward mode
of the call itself is refused: ask for `jax_reference` there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyattn.backends.blockwise.block_gradients import Incoming, gradients
from polyattn.backends.blockwise.online_softmax import attend
from polyattn.backends.blockwise.score_tiles import Array, Blocks, Extras
from polyattn.jax.kit.layouts import from_bnth, grouped, joined, lse_from_bnt, to_bnth
from polyattn.jax.kit.masking import Dims, expand_blocks
from polyattn.jax.kit.own_promotion import own_promotion
from polyattn.jax.kit.reverse_only import reverse_only
from polyattn.problem import Problem

__all__ = ["load", "load_decode"]

_BLOCK, _LEAST = 512, 64
_MOST_ENTRIES = 1 << 23  # scores at once, of all heads
_FEW = 16
_DECODE_BLOCK = 8192  # keys at once: few rows make few scores


def load() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Return `prepare`, as :class:`polyattn.registry.Backend` describes it."""
    return _prepare


def load_decode() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Return `prepare` for few queries: all of them at once, over large blocks of keys."""

    def prepare(problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
        few = problem.q_len <= _FEW
        sizes = {"block_k": _DECODE_BLOCK, **config} if few else config
        return _prepare(problem, sizes, "jax_decode")

    return prepare


def _prepare(
    problem: Problem, config: Mapping[str, Any], name: str = "jax_blockwise"
) -> Callable[..., Any]:
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale

    def kernel(
        q: Array, k: Array, v: Array, mask: Any = None, bias: Any = None, sinks: Any = None,
        dropout_key: Any = None,
    ) -> Any:  # fmt: skip
        q4, k4, v4 = (to_bnth(x, problem.layout) for x in (q, k, v))
        dims = Dims.of(q4, k4)
        block_q, block_k = _sizes(dims, config)
        blocks = Blocks(dims, block_q, block_k, scale, problem.softcap)
        mask = None if mask is None else expand_blocks(mask, dims.kv_len)
        given = q4, k4, v4, Extras(mask, bias, sinks)
        out, lse = _attention(blocks, *reverse_only(name, given))
        out = from_bnth(out, problem.layout)
        return (out, lse_from_bnt(lse, problem.layout)) if problem.lse else out

    return kernel


def _sizes(dims: Dims, config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the sizes of blocks: those of the config, or as many as keep the tile small."""
    block_q = min(int(config.get("block_q", _BLOCK)), dims.q_len)
    block_k = min(int(config.get("block_k", _BLOCK)), dims.kv_len)
    if config:
        return block_q, block_k
    heads = dims.batch * dims.heads
    while heads * block_q * block_k > _MOST_ENTRIES and max(block_q, block_k) > _LEAST:
        if block_q >= block_k:
            block_q = max(block_q // 2, 1)
        else:
            block_k = max(block_k // 2, 1)
    return block_q, block_k


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(blocks: Blocks, q: Array, k: Array, v: Array, extras: Extras) -> Any:
    """Return out (B, N, T, V) in the dtype of q, and lse (B, N, T) in the wide type."""
    out, lse = attend(blocks, extras, *_padded(blocks, q, k, v))
    return _cut(blocks, out).astype(q.dtype), _cut(blocks, lse)


def _forward(blocks: Blocks, q: Array, k: Array, v: Array, extras: Extras) -> Any:
    out, lse = attend(blocks, extras, *_padded(blocks, q, k, v))
    results = _cut(blocks, out).astype(q.dtype), _cut(blocks, lse)
    # gradients of sinks and bias are sums over rows of dout * out: not of one that was rounded
    return results, (q, k, v, extras, out, lse)


def _backward(blocks: Blocks, kept: Any, given: tuple[Array, Array]) -> Any:
    q, k, v, extras, out, lse = kept
    wide = lse.dtype
    dout, dlse = (_blocked(grouped(x.astype(wide), k.shape[1]), blocks.q, 3) for x in given)
    delta = (dout * out).sum(-1) - dlse
    dq, dk, dv, dbias, dsinks = gradients(
        blocks, extras, *_padded(blocks, q, k, v), Incoming(dout, lse, delta)
    )
    bias = None if extras.bias is None else extras.bias.map(lambda name, x: dbias)
    cut_k, cut_v = (x[:, :, : blocks.dims.kv_len].astype(k.dtype) for x in (dk, dv))
    return _cut(blocks, dq).astype(q.dtype), cut_k, cut_v, Extras(None, bias, dsinks)


_attention.defvjp(own_promotion(_forward), own_promotion(_backward))


def _padded(blocks: Blocks, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Group the heads, and fill up the last blocks with zeros, which the tiles mask."""
    return (
        _blocked(grouped(q, k.shape[1]), blocks.q, 3),
        _blocked(k, blocks.k, 2),
        _blocked(v, blocks.k, 2),
    )


def _blocked(x: Array, size: int, axis: int) -> Array:
    lacking = -x.shape[axis] % size
    pads = [(0, lacking if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, pads) if lacking else x


def _cut(blocks: Blocks, x: Array) -> Array:
    """Undo :func:`_padded` of what is shaped as the queries are."""
    return joined(x[:, :, :, : blocks.dims.q_len])
