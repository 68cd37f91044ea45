"""JAX: ``jax.nn.dot_product_attention``, compiled by XLA for the CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from polyattn_peers.call import Call, Prepared


def versions() -> dict[str, str]:
    """Return what is installed."""
    return {"jax": jax.__version__}


def prepare(call: Call) -> Prepared:
    """Compile the function for these arrays."""
    kinds = {"bfloat16": ml_dtypes.bfloat16}
    q, k, v = (
        jnp.asarray(x.view(kinds.get(call.dtype, x.dtype))) for x in (call.q, call.k, call.v)
    )
    second = call.layout == "BNTH"
    options: dict[str, Any] = {"scale": call.scale, "is_causal": call.mask == "causal"}
    if call.allowed is not None and call.mask != "causal":
        options["mask"] = jnp.asarray(call.allowed)

    def attend(q: Any, k: Any, v: Any) -> Any:
        if second:
            q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        out = jax.nn.dot_product_attention(q, k, v, **options)
        return out.transpose(0, 2, 1, 3) if second else out

    compiled = jax.jit(attend).lower(q, k, v).compile()
    return Prepared(
        lambda: compiled(q, k, v).block_until_ready(), lambda out: np.asarray(out, np.float32)
    )
