"""Gradients of JAX calls by the definition, where rows have an lse that has lost its sum.

The kernel makes probabilities again from scores and their lse, max + log(sum). In a row whose
every score is as good as infinite, as under a mask of ``finfo.min`` alone, the log of the sum is
nothing beside the maximum and is rounded away: each of the tied keys would get the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from polyattn.jax.kit.defined_attention import defined_attention
from polyattn.jax.kit.layouts import to_bnth
from polyattn.jax.kit.masking import Dims, coordinates
from polyattn.masks import Dense
from polyattn.masks.biases import DenseBias
from polyattn.native.decoded import allowed_at, sequences_of

__all__ = ["defined_gradients", "meets_lost_sums"]

Array: TypeAlias = jax.Array
Maybe: TypeAlias = Array | None

_LOST = 2.0**17
"""From here on an lse is known to 1/64 and worse, and so are the probabilities made from it."""


def meets_lost_sums(dout: Array, dlse: Maybe, lse: Array, layout: str) -> Array:
    """Say whether a gradient comes in to a row whose lse has lost its sum, () bool."""
    comes = (dout != 0).any(-1)
    comes = comes if layout == "BNTH" else jnp.swapaxes(comes, -1, -2)
    comes = comes if dlse is None else comes | (dlse != 0)
    found: Array = _any((jnp.abs(lse) > _LOST) & jnp.isfinite(lse) & comes)
    return found


def _any_of_all(size: int, batched: Sequence[bool], x: Array) -> tuple[Array, bool]:
    """Answer for all entries at once: a condition that differs by entry takes both ways."""
    return x.any(), False


_any = custom_vmap(lambda x: x.any())
_any.def_vmap(_any_of_all)


def defined_gradients(
    arrays: Any, dout: Array, dlse: Maybe, codes: Sequence[int], *,
    layout: str, scale: float, softcap: float | None,
) -> tuple[Array, Array, Array, Array, Maybe]:  # fmt: skip
    """Return the gradients of q, k, v, a dense bias and sinks; all scores are held at once.

    `arrays`: with `q`, `k`, `v`, `masks`, `bias` and `sinks`, as the kernels read them. `codes`:
    the mask's program, see `polyattn.native.program`.
    """
    dims = Dims.of(to_bnth(arrays.q, layout), to_bnth(arrays.k, layout))
    index = coordinates(sequences_of(codes, arrays.masks), dims)
    seen = allowed_at(codes, arrays.masks, index)
    mask = None if seen is None else Dense(seen)

    def run(q: Array, k: Array, v: Array, bias: Array, sinks: Maybe) -> tuple[Array, Array]:
        return defined_attention(
            q, k, v, mask, DenseBias(bias), sinks, layout=layout, scale=scale, softcap=softcap
        )

    given = arrays.q, arrays.k, arrays.v, arrays.bias, arrays.sinks
    (out, lse), back = jax.vjp(run, *given)
    come = jnp.zeros_like(lse) if dlse is None else dlse.astype(lse.dtype)
    found: tuple[Array, Array, Array, Array, Maybe] = back((dout.astype(out.dtype), come))
    return found
