"""Masks and biases remain the same pytrees, whatever stands in the place of their arrays."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from polyattn import Alibi, BlockMap, Causal, Dense, DenseBias, Padding, PrefixLM, Segments, Window
from polyattn.jax import attention


def values() -> dict[str, Any]:
    lengths = jnp.array([2, 5])
    return {
        "padding": Padding(q_lengths=lengths, kv_lengths=lengths),
        "joined": Causal() & Window(left=3) & Padding(kv_lengths=lengths),
        "complement": ~(PrefixLM(lengths) | Segments(jnp.arange(5) // 2, jnp.arange(5) // 3)),
        "dense": Dense(jnp.ones((5, 5), bool)),
        "blocks": BlockMap(8, 8, jnp.zeros((1, 1, 1, 1), int), jnp.ones((1, 1, 1), int)),
        "slopes": Alibi(jnp.ones(2)),
        "bias": DenseBias(jnp.zeros((5, 5))),
    }


@pytest.mark.parametrize("leaf", [None, True, 0, 0.5, "name", (2, 3)])
def test_the_structure_stays_whatever_the_leaves_become(leaf: Any) -> None:
    # as equinox.partition (None, True) and axes of vmap (numbers) map them, leaf by leaf
    for name, value in values().items():
        structure = jax.tree.structure(value)
        mapped = jax.tree.map(lambda _: leaf, value)
        assert jax.tree.structure(mapped, is_leaf=lambda x: x is leaf) == structure, name
        assert type(value).__name__ in repr(mapped) or name in ("joined", "complement")
        restored = jax.tree.map(lambda _, x: x, mapped, value, is_leaf=lambda x: x is leaf)
        assert jax.tree.structure(restored) == structure, name


def test_a_map_of_axes_is_one_for_vmap() -> None:
    q, lengths = jnp.ones((1, 5, 2, 4)), jnp.array([[2], [5]])
    mask = Causal() & Padding(kv_lengths=lengths[0])
    spread = jax.tree.map(lambda _: lengths, mask)
    axes = jax.tree.map(lambda _: 0, mask)
    found = jax.vmap(lambda mask: attention(q, q, q, mask=mask), in_axes=(axes,))(spread)
    assert found.shape == (2, *q.shape)


def test_a_model_that_holds_masks_is_differentiated_by_equinox() -> None:
    eqx = pytest.importorskip("equinox")

    class Layer(eqx.Module):  # type: ignore[misc,name-defined]
        mask: Any
        bias: Any

        def __call__(self, q: Any) -> Any:
            return attention(q, q, q, mask=self.mask, bias=self.bias)

    q = jax.random.normal(jax.random.key(0), (2, 5, 2, 4))
    layer = Layer(Causal() & Padding(kv_lengths=jnp.array([2, 5])), DenseBias(jnp.zeros((5, 5))))
    found = eqx.filter_grad(lambda layer: jnp.sum(jnp.sin(layer(q))))(layer)
    plain = jax.grad(lambda bias: jnp.sum(jnp.sin(Layer(layer.mask, bias)(q))))(layer.bias)
    np.testing.assert_allclose(found.bias.bias, plain.bias, atol=1e-6)
    assert not jax.tree.leaves(found.mask)


@pytest.mark.parametrize("first", ["import jax, polyattn.jax", "import polyattn.jax, jax"])
def test_masks_are_pytrees_before_any_name_was_looked_up(first: str) -> None:
    program = f"""
{first}
from polyattn import Padding
mask = Padding(kv_lengths=jax.numpy.array([2, 5]))
assert len(jax.tree.leaves(mask)) == 1
q = jax.numpy.ones((2, 5, 2, 4))
jax.jit(lambda q, mask: polyattn.jax.attention(q, q, q, mask=mask))(q, mask)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_import_starts_no_backend() -> None:
    program = """
import polyattn.jax
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
