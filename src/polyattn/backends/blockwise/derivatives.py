"""Derivatives of the passes themselves, which derivatives of derivatives ask for.

A loop that passes over tiles nobody sees has ends that are known only when it runs, and JAX cannot
go back through such. What is differentiated loops over all tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from polyattn.backends.blockwise.score_tiles import Blocks

__all__ = ["over_all_tiles"]

F = TypeVar("F", bound=Callable[..., Any])


def over_all_tiles(function: F) -> F:
    """Return ``function(blocks, *arrays)``, whose derivatives go over all tiles; a decorator."""

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def run(blocks: Blocks, *arrays: Any) -> Any:
        return function(blocks, *arrays)

    def derive(blocks: Blocks, primals: Any, tangents: Any) -> Any:
        whole = functools.partial(function, blocks._replace(whole=True))
        return jax.jvp(whole, primals, tangents)

    run.defjvp(derive)
    return functools.wraps(function)(run)  # type: ignore[return-value]
