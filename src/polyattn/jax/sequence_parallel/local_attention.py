"""What each device computes of a spread sequence: an ordinary call, on whole arrays."""

from __future__ import annotations

from typing import Any

from polyattn.jax.context import within_spread
from polyattn.jax.dispatch import admitted, run

__all__ = ["local_attention"]


def local_attention(q: Any, k: Any, v: Any, *, backend: Any = None, **options: Any) -> Any:
    """Call attention on a device's part, whose backend is chosen as everywhere.

    What is asked for around the call for the whole (``backend="jax_ring"``) is not asked here.
    """
    every = {
        "mask": None, "bias": None, "scale": None, "softcap": None, "sinks": None,
        "dropout_p": 0.0, "layout": "BTNH", "return_lse": True, "deterministic": None, **options,
    }  # fmt: skip
    with within_spread(None):
        call = admitted(q, k, v, None, every)
        return run(call, q, k, v, None, backend, part=True)
