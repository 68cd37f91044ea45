"""Forward mode where kernels have reverse mode alone: refused in words, in compiled code too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from polyattn import DenseBias, Unsupported
from polyattn.jax import attention, spread_sequence
from polyattn.selection.registry import Available, registry

Way = Callable[[Callable[[Any], Any]], Any]


def draw(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


Q, K, BIAS = draw(0, 1, 3, 2, 4), draw(1, 1, 3, 1, 4), draw(2, 3, 3)

FORWARD: dict[str, Way] = {
    "jvp": lambda f: jax.jvp(f, (Q,), (Q,)),
    "jvp of jit": lambda f: jax.jvp(jax.jit(f), (Q,), (Q,)),
    "jit of jvp": lambda f: jax.jit(lambda q: jax.jvp(f, (q,), (q,))[1])(Q),
    "jacfwd of jit": lambda f: jax.jacfwd(jax.jit(f))(Q),
    "linearize": lambda f: jax.linearize(f, Q)[1](Q),
    "jvp of jvp": lambda f: jax.jvp(lambda q: jax.jvp(f, (q,), (Q,))[1], (Q,), (Q,)),
}
OTHERS: dict[str, Way] = {
    "grad of jit": lambda f: jax.grad(lambda q: jnp.sin(jax.jit(f)(q)).sum())(Q),
    "grad of vmap": lambda f: jax.jit(jax.grad(lambda q: jax.vmap(f)(q).sum()))(Q[None]),
    "jvp of grad": lambda f: jax.jit(
        lambda p: jax.jvp(jax.grad(lambda q: jnp.sin(f(q)).sum()), (p,), (p,))[1]
    )(Q),
    "jvp of the gradient of another": lambda f: jax.jit(
        lambda p: jax.jvp(lambda p: jax.grad(lambda q: f(p * q).sum())(Q), (p,), (p,))[1]
    )(Q),
}


def on(backend: str) -> Callable[[Any], Any]:
    if not isinstance(registry.probe(("jax", backend)), Available):
        pytest.skip(f"no {backend} here")
    return lambda q: attention(q, K, K, backend=backend)


@pytest.mark.parametrize("backend", ["native_cpu", "jax_blockwise"])
@pytest.mark.parametrize("way", FORWARD)
def test_it_is_refused_with_what_to_ask_for(way: str, backend: str) -> None:
    with pytest.raises(Unsupported, match=rf"{backend}, which .*backend='jax_reference'"):
        FORWARD[way](on(backend))


def test_of_what_else_is_learnt() -> None:
    def biased(x: Any) -> Any:
        return attention(Q, K, K, bias=DenseBias(x), backend="jax_blockwise")

    with pytest.raises(Unsupported, match="forward derivative"):
        jax.jvp(biased, (BIAS,), (BIAS,))


def test_a_ring_names_what_runs_without_it() -> None:
    rows = jax.sharding.PartitionSpec(None, "sp")

    def layer(q: Any) -> Any:
        with spread_sequence("sp"):
            return attention(q, q, q, backend="jax_ring")

    mesh = jax.sharding.Mesh(jax.devices()[:1], ("sp",))
    over = jax.shard_map(layer, mesh=mesh, in_specs=rows, out_specs=rows)
    with pytest.raises(Unsupported, match="'jax_reference', outside of spread_sequence"):
        jax.jvp(over, (Q,), (Q,))


@pytest.mark.parametrize("way", OTHERS)
def test_reverse_mode_and_forward_over_it_are_as_they_were(way: str) -> None:
    ours, true = (OTHERS[way](on(name)) for name in ("jax_blockwise", "jax_reference"))
    np.testing.assert_allclose(ours, true, atol=1e-5, rtol=1e-4)
