"""A tile of the scores: products, soft cap, bias and mask, for some queries and some keys.

Arrays are grouped: q (B, K, G, T, H) with G = N // K, k and v (B, K, S, ...), padded to whole
blocks. What lies past T or S is masked.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from polyattn.jax.kit.layouts import grouped
from polyattn.jax.kit.masking import Dims, allowed, bias_scores
from polyattn.masks import And, Mask, Padding
from polyattn.masks.biases import Bias

__all__ = ["Blocks", "Extras", "Tile", "block_range", "part", "row_range", "scored", "tile"]

Array: TypeAlias = jax.Array


class Blocks(NamedTuple):
    """How a call is cut; hashable.

    `dims`: the sizes without padding. `whole`: tiles that nobody sees are visited, too.
    """

    dims: Dims
    q: int
    k: int
    scale: float
    softcap: float | None
    whole: bool = False

    @property
    def of_q(self) -> int:
        """How many blocks of queries there are."""
        return -(-self.dims.q_len // self.q)

    @property
    def of_k(self) -> int:
        """How many blocks of keys there are."""
        return -(-self.dims.kv_len // self.k)


class Extras(NamedTuple):
    """What is beside q, k and v: a pytree."""

    mask: Mask | None
    bias: Bias | None
    sinks: Any


class Tile(NamedTuple):
    """Scores (B, K, G, R, C) in the wide type; `seen`: which count; `slope`: of the soft cap."""

    scores: Array
    seen: Array
    slope: Array | None


def part(x: Array, block: Array, size: int, axis: int) -> Array:
    """Return a block of an array along an axis."""
    return jax.lax.dynamic_slice_in_dim(x, block * size, size, axis)


def tile(blocks: Blocks, extras: Extras, q: Array, k: Array, i: Array, j: Array) -> Tile:
    """Compute the tile of query block `i` (q: (B, K, G, R, H)) and key block `j` (k: (B, K, C, H)).

    Entries of k that are not finite are taken as they are: where they are attended they reach the
    row, as NaN, and elsewhere the mask takes their place.
    """
    dims, wide = blocks.dims, jnp.promote_types(q.dtype, jnp.float32)
    rows, columns = i * blocks.q + jnp.arange(blocks.q), j * blocks.k + jnp.arange(blocks.k)
    seen = ((rows < dims.q_len)[:, None] & (columns < dims.kv_len))[None, None]
    if extras.mask is not None:
        seen = seen & allowed(extras.mask, dims, rows, columns)
    added = None
    if extras.bias is not None:
        added = _grouped(bias_scores(extras.bias, dims, wide, rows, columns), dims)
    return scored(q, k, _grouped(seen, dims), added, blocks.scale, blocks.softcap)


def scored(
    q: Array, k: Array, seen: Array, bias: Array | None, scale: float, softcap: float | None
) -> Tile:
    """Compute the scores of q (B, K, G, R, H) and k (B, K, C, H), of which some are seen."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=wide, precision="highest")
    scores, slope = scores * jnp.asarray(scale, wide), None
    if softcap is not None:
        share = jnp.tanh(jnp.where(seen, scores, 0) / softcap)
        scores, slope = softcap * share, 1 - share * share
    if bias is not None:
        scores = scores + bias
    # an infinite score is what a key that is not finite gives: NaN, whatever its sign
    bad = _bad(q)[..., None] | _bad(k)[:, :, None, None]
    scores = jnp.where(bad, jnp.nan, scores)
    return Tile(jnp.where(seen, scores, -jnp.inf), seen, slope)


def _bad(x: Array) -> Array:
    return ~jnp.isfinite(x).all(-1)


def _grouped(x: Array, dims: Dims) -> Array:
    """Return what broadcasts to (B, N, R, C) as what broadcasts to (B, K, G, R, C)."""
    return x[:, :, None] if x.shape[1] == 1 else grouped(x, dims.kv_heads)


def _band(mask: Mask | None) -> tuple[int | None, int | None]:
    """Return the least and the greatest key that is seen, from the query's own; None: no bound."""
    low: int | None = None
    high: int | None = None
    parts = () if mask is None else mask.parts if isinstance(mask, And) else (mask,)
    for one in parts:
        least, most = one.band or (None, None)
        low = least if low is None else low if least is None else max(low, least)
        high = most if high is None else high if most is None else min(high, most)
    return low, high


def block_range(blocks: Blocks, mask: Mask | None, i: Array) -> tuple[Any, Any]:
    """Return the first key block that query block `i` may see, and the end of them."""
    if blocks.whole:
        return 0, blocks.of_k
    low, high = _band(mask) if mask is None or "Packed" not in mask.kinds else (None, None)
    dims = blocks.dims
    shift = 0 if mask is not None and mask.align == "top_left" else dims.kv_len - dims.q_len
    first, last = i * blocks.q + shift, i * blocks.q + blocks.q - 1 + shift
    begin = 0 if low is None else jnp.clip((first + low) // blocks.k, 0, blocks.of_k)
    end = blocks.of_k if high is None else jnp.clip((last + high) // blocks.k + 1, 0, blocks.of_k)
    for lengths in _key_lengths(mask):  # none of the batch has more
        end = jnp.minimum(end, -(-lengths.max() // blocks.k))
    return begin, end


def _key_lengths(mask: Mask | None) -> list[Array]:
    """Return the lengths of keys that a mask holds each batch entry to."""
    if mask is None or "Packed" in mask.kinds:
        return []
    parts = mask.parts if isinstance(mask, And) else (mask,)
    found = [part.kv_lengths for part in parts if isinstance(part, Padding)]
    return [jnp.asarray(lengths) for lengths in found if lengths is not None]


def row_range(blocks: Blocks, mask: Mask | None, j: Array) -> tuple[Any, Any]:
    """Return the first query block that may see key block `j`, and the end of them."""
    if blocks.whole:
        return 0, blocks.of_q
    low, high = _band(mask) if mask is None or "Packed" not in mask.kinds else (None, None)
    dims = blocks.dims
    shift = 0 if mask is not None and mask.align == "top_left" else dims.kv_len - dims.q_len
    first, last = j * blocks.k - shift, j * blocks.k + blocks.k - 1 - shift
    begin = 0 if high is None else jnp.clip((first - high) // blocks.q, 0, blocks.of_q)
    end = blocks.of_q if low is None else jnp.clip((last - low) // blocks.q + 1, 0, blocks.of_q)
    return begin, end
