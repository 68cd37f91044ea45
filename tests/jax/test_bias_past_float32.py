"""A float64 bias beside float32 queries: what float32 does not hold stays finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from polyattn import DenseBias
from polyattn.jax import attention
from polyattn.selection.registry import Available, registry


def draw(seed: int, keys: int) -> Any:
    return np.random.default_rng(seed).standard_normal((1, keys, 2, 4)).astype(np.float32)


Q, K, V = draw(0, 5), draw(1, 7), draw(2, 7)


@pytest.mark.parametrize(
    "backend", ["native_cpu", "jax_blockwise", "jax_decode", "jax_xla", "jax_reference"]
)
def test_rows_of_the_least_number_are_means_and_rows_of_infinity_are_0(backend: str) -> None:
    if not isinstance(registry.probe(("jax", backend)), Available):
        pytest.skip(f"no {backend} here")
    with jax.enable_x64(True):
        bias = jnp.full((5, 7), jnp.finfo(jnp.float64).min).at[3].set(-jnp.inf)
        found = attention(*map(jnp.asarray, (Q, K, V)), bias=DenseBias(bias), backend=backend)
    want = np.broadcast_to(V.mean(1, keepdims=True), Q.shape).copy()
    want[:, 3] = 0
    np.testing.assert_allclose(found, want, atol=1e-6)
