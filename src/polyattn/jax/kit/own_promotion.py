"""Kernels under JAX's usual rules of promotion, whatever the program around them has set.

A program may forbid JAX to promote dtypes or ranks by itself, to find its own mistakes. Kernels
mean what they mix: masks with scores, numbers with arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

__all__ = ["own_promotion"]

F = TypeVar("F", bound=Callable[..., Any])


def own_promotion(function: F) -> F:
    """Return the function, run under JAX's usual rules of promotion; a decorator.

    >>> import jax.numpy as jnp
    >>> added = own_promotion(lambda x: x + jnp.ones(3, jnp.int32))
    >>> with jax.numpy_dtype_promotion("strict"):
    ...     added(jnp.ones(3)).dtype.name
    'float32'
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        set_here = jax.config.jax_numpy_dtype_promotion, jax.config.jax_numpy_rank_promotion
        if set_here == ("standard", "allow"):
            return function(*args, **kwargs)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]
