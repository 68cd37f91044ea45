"""Gradients under JAX of rows whose every score is as good as infinite: a mask of ``finfo.min``.

Their lse is that minimum, whatever the number of keys, and the probabilities are all alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp

from polyattn.jax import attention
from polyattn.masks import (
    BlockMap,
    Causal,
    Chunked,
    Dense,
    FirstKeys,
    LeftPadding,
    Padding,
    Segments,
    Window,
)
from polyattn.masks.biases import DenseBias
from polyattn.native import module
from polyattn.selection.registry import Available

if not isinstance(module.status(), Available):
    pytest.skip("the extension is not built", allow_module_level=True)

B, T, S, N, K, H = 2, 5, 6, 4, 2, 16


def inputs(dtype: Any, layout: str = "BTNH") -> tuple[list[Any], Any]:
    draw = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    arrays = [jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes]
    bias = jnp.asarray(draw.normal(size=(B, 1, T, S)), dtype)
    bias = bias.at[0, :, 0].set(jnp.finfo(dtype).min).at[1, :, 3].set(jnp.finfo(dtype).min)
    return [jnp.swapaxes(x, 1, 2) if layout == "BNTH" else x for x in arrays], bias


def loss_of(backend: str, layout: str, lse: bool, mask: Any = None) -> Callable[..., Any]:
    def loss(q: Any, k: Any, v: Any, bias: Any, sinks: Any = None) -> Any:
        got = attention(
            q, k, v, mask=mask, bias=DenseBias(bias), sinks=sinks, layout=layout, return_lse=lse,
            backend=backend,
        )  # fmt: skip
        values = got if lse else (got,)
        weights = np.random.default_rng(1)
        total = jnp.zeros(())
        for x in values:
            x = jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32)
            total += (jnp.tanh(x) * jnp.asarray(weights.normal(size=x.shape), jnp.float32)).sum()
        return total

    return loss


def assert_alike(mine: Any, other: Any, near: float = 1e-5) -> None:
    for one, two in zip(mine, other, strict=True):
        one, two = np.asarray(one, np.float32), np.asarray(two, np.float32)
        np.testing.assert_allclose(one, two, rtol=near, atol=near)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_probabilities_of_a_row_without_a_favourite_are_alike(
    dtype: str, layout: str, lse: bool
) -> None:
    arrays, bias = inputs(dtype, layout)
    found = [
        jax.jit(jax.grad(loss_of(backend, layout, lse), (0, 1, 2, 3)))(*arrays, bias)
        for backend in ("native_cpu", "jax_reference")
    ]
    assert_alike(*found, near=1e-5 if dtype == "float32" else 0.05)


MASKS = {
    "causal": lambda: Causal(),
    "window": lambda: Window(1, 1),
    "left of a window": lambda: Window(2, None),
    "a window past all lengths": lambda: Window(2**40, 2**41),
    "padding": lambda: Padding(None, jnp.array([4, 6])),
    "left padding": lambda: LeftPadding(None, jnp.array([2, 0])),
    "segments": lambda: Segments(
        jnp.array([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]), jnp.array([[0, 0, 0, 1, 1, 1]] * 2)
    ),
    "chunks": lambda: Chunked(3) & Causal(),
    "first keys": lambda: Causal() & (Window(1, None) | FirstKeys(2)),
    "but the diagonal": lambda: ~Window(0, 0),
    "dense": lambda: Dense(jnp.asarray(np.random.default_rng(3).random((B, 1, T, S)) < 0.7)),
    "blocks": lambda: BlockMap(
        2, 3, jnp.array([[[[0, 1], [1, 0], [0, 1]]]]), jnp.array([[[2, 1, 1]]])
    ),
}  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
def test_within_every_mask_and_with_sinks(mask: str) -> None:
    arrays, bias = inputs("float32")
    sinks = jnp.linspace(-1, 1, N)
    found = [
        jax.grad(loss_of(backend, "BTNH", False, MASKS[mask]()), (0, 1, 2, 3, 4))(
            *arrays, bias, sinks
        )
        for backend in ("native_cpu", "jax_reference")
    ]
    assert_alike(*found)


def test_mapped_differentiated_and_in_a_loop() -> None:
    arrays, bias = inputs("float32")
    many = [jnp.stack([x, -x, 2 * x]) for x in arrays]
    lost = jnp.stack([bias, jnp.zeros_like(bias), bias])
    found = []
    for backend in ("native_cpu", "jax_reference"):
        grad = jax.grad(loss_of(backend, "BTNH", False), (0, 1, 2, 3))
        found.append(jax.jit(jax.vmap(grad))(*many, lost))
        looped = jax.lax.map(lambda each, grad=grad: grad(*each), (*many, lost))
        assert_alike(looped, found[-1])
    assert_alike(*found)


def test_the_kernel_runs_where_no_gradient_comes_in_to_such_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from polyattn.backends.native_cpu import jax as native

    seen = []
    real = native.defined_gradients

    def noted(*args: Any, **kwargs: Any) -> Any:
        jax.debug.callback(lambda: seen.append(1))
        return real(*args, **kwargs)

    monkeypatch.setattr(native, "defined_gradients", noted)
    arrays, bias = inputs("float32")
    alive = jnp.ones((B, T, 1, 1)).at[0, 0].set(0).at[1, 3].set(0)

    def loss(q: Any, weights: Any) -> Any:
        got = attention(q, *arrays[1:], bias=DenseBias(bias), backend="native_cpu")
        return (got * weights).sum()

    jax.block_until_ready(jax.grad(loss)(arrays[0], alive))
    jax.effects_barrier()
    assert not seen
    jax.block_until_ready(jax.grad(loss)(arrays[0], jnp.ones_like(alive)))
    jax.effects_barrier()
    assert seen
