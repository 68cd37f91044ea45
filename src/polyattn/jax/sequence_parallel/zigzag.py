"""The order of a sequence over devices in which causal attention gives each the same work.

The sequence is cut into twice as many chunks as there are devices; device r holds chunks r and
2P - 1 - r, an early one and a late one. Source: Zhu, *ring-flash-attention* (zigzag), and Brandon
et al., *Striped Attention* (arXiv 2311.09431), for the imbalance that it mends.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from polyattn.errors import InvalidProblem

__all__ = ["from_zigzag", "to_zigzag", "zigzag_order"]

Array: TypeAlias = jax.Array


def zigzag_order(length: int, devices: int) -> np.ndarray[Any, Any]:
    """Return which row of the sequence lies at each place, (length,) integers.

    Raises :class:`InvalidProblem` where the length is no multiple of twice the devices.

    >>> zigzag_order(8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    if devices < 1 or length % (2 * devices):
        raise InvalidProblem(
            f"got a sequence of {length} for {devices} devices in zigzag order, expected a "
            f"multiple of {2 * devices}: two chunks for each. Pad it, and mask the padding."
        )
    chunks = np.arange(length).reshape(2 * devices, -1)
    order = [chunks[[rank, 2 * devices - 1 - rank]].ravel() for rank in range(devices)]
    return np.concatenate(order) if order else chunks.ravel()


def to_zigzag(x: Array, devices: int, axis: int = 1) -> Array:
    """Put the rows of a whole array into zigzag order, before it is spread over the devices.

    >>> import jax.numpy as jnp
    >>> to_zigzag(jnp.arange(8)[None], 2).tolist()
    [[0, 1, 6, 7, 2, 3, 4, 5]]
    """
    return jnp.take(x, jnp.asarray(zigzag_order(x.shape[axis], devices)), axis=axis)


def from_zigzag(x: Array, devices: int, axis: int = 1) -> Array:
    """Undo :func:`to_zigzag`.

    >>> import jax.numpy as jnp
    >>> from_zigzag(to_zigzag(jnp.arange(8)[None], 2), 2).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    order = np.argsort(zigzag_order(x.shape[axis], devices))
    return jnp.take(x, jnp.asarray(order), axis=axis)
