"""What looks like an array of JAX and is none: refused before JAX's own errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from polyattn import DenseBias, InvalidProblem
from polyattn.jax import attention

Q, K = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 1, 4))


def masked(*shape: int) -> Any:
    return np.ma.array(np.ones(shape, np.float32), mask=True)


def test_masked_arrays_of_numpy() -> None:
    with pytest.raises(InvalidProblem, match=r"query of type MaskedArray.*filled"):
        attention(masked(1, 3, 2, 4), K, K)
    with pytest.raises(InvalidProblem, match=r"bias of type MaskedArray.*filled"):
        attention(Q, K, K, bias=DenseBias(masked(3, 3)))


def test_keys_of_random_numbers() -> None:
    key = jax.random.key(0)
    with pytest.raises(InvalidProblem, match=r"query of shape \(\), expected 4 dims"):
        attention(key, K, K)
    with pytest.raises(InvalidProblem, match="query of dtype key<fry>"):
        attention(jax.random.split(key, Q.shape), K, K)


def test_shapes_without_numbers() -> None:
    shape = jax.ShapeDtypeStruct(Q.shape, Q.dtype)
    with pytest.raises(InvalidProblem, match=r"ShapeDtypeStruct.*jax\.eval_shape"):
        attention(shape, K, K)
    assert jax.eval_shape(attention, shape, K, K) == shape
