"""Derivatives of derivatives through blocks, of which masks leave some out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from polyattn import Causal, Padding, Problem, Window
from polyattn.selection.registry import registry

B, T, N, K, H = 2, 9, 2, 1, 8
MASKS = {"causal": Causal() & Window(left=5), "lengths": Padding(kv_lengths=jnp.array([6, 0]))}


def draw(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("name", MASKS)
def test_gradients_of_gradients_are_those_of_the_definition(name: str) -> None:
    problem = Problem(
        batch=B, q_len=T, kv_len=T, heads=N, kv_heads=K, head_dim=H, device="cpu", framework="jax",
        grad=True,
    )  # fmt: skip
    arrays = draw(0, B, T, N, H), draw(1, B, T, K, H), draw(2, B, T, K, H)

    def found(backend: str, config: dict[str, int]) -> Any:
        kernel = registry["jax", backend].load()(problem, config)

        def once(q: Any) -> Any:
            return jnp.sin(kernel(q, *arrays[1:], MASKS[name])).sum()

        return jax.jit(jax.grad(lambda q: jnp.cos(jax.grad(once)(q)).sum()))(arrays[0])

    ours = found("jax_blockwise", {"block_q": 4, "block_k": 4})
    np.testing.assert_allclose(ours, found("jax_reference", {}), atol=1e-5, rtol=1e-4)
