"""JAX's Splash kernel under our masks: interpreted on the CPU, and lowered for a TPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from polyattn import Causal, Dense, Padding, Problem, Segments, Unsupported, Window, settings
from polyattn.jax import attention
from polyattn.selection.registry import registry

B, T, S, N, K, H = 2, 140, 150, 4, 2, 24
LINE = np.arange(S) // 40
MASKS = {
    "none": None,
    "window": Causal() & Window(left=20),
    "rows without keys": Padding(q_lengths=[140, 20], kv_lengths=[150, 0]) & Causal(),
    "segments": Segments(LINE[:T], LINE + 1) & Padding(kv_lengths=[70, 150]),
    "more rows than keys": Causal(),
}


def draw(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


Q, KEY, V = draw(0, B, T, N, H), draw(1, B, S, K, H), draw(2, B, S, K, H + 8)


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    """CPUs run the kernel where this is asked for."""
    with settings.within({"POLYATTN_PALLAS_INTERPRET": "1"}):
        yield


@pytest.mark.parametrize("name", MASKS)
def test_forward_and_backward_are_those_of_the_definition(name: str) -> None:
    mask, keys = MASKS[name], 60 if name.startswith("more") else S
    sinks = draw(3, N, 2) if name == "window" else None
    arrays = Q, KEY[:, :keys], V[:, :keys]

    def found(backend: str) -> list[Any]:
        def call(q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, mask=mask, sinks=sinks, softcap=5.0, backend=backend)

        out, pull = jax.vjp(jax.jit(call), *arrays)
        _, lse = attention(
            *arrays, mask=mask, sinks=sinks, softcap=5.0, return_lse=True, backend=backend
        )
        return [out, lse, *pull(jnp.sin(jnp.arange(out.size)).reshape(out.shape))]

    for one, want in zip(found("splash"), found("jax_reference"), strict=True):
        np.testing.assert_allclose(one, want, atol=3e-6, rtol=1e-5)


def test_grouped_heads_run_where_numbers_have_64_bits() -> None:
    arrays = Q[:1, :60], KEY[:1, :60], V[:1, :60]

    def call(backend: str) -> Any:
        return lambda *arrays: attention(*arrays, backend=backend)

    jax.config.update("jax_enable_x64", True)
    try:
        found, want = call("splash")(*arrays), call("jax_reference")(*arrays)
        np.testing.assert_allclose(found, want, atol=3e-6, rtol=1e-5)
        taken = jax.eval_shape(lambda *a: jax.vjp(call("splash"), *a)[1](found), *arrays)
        assert [(x.shape, x.dtype) for x in taken] == [(x.shape, x.dtype) for x in arrays]
    finally:
        jax.config.update("jax_enable_x64", False)


def test_what_is_not_finite_reaches_the_rows_that_see_it() -> None:
    k, v = KEY.at[0, 100, 1, 2].set(-jnp.inf), V.at[1, 120].set(jnp.nan).at[1, 149].set(jnp.inf)
    out, lse = attention(Q, k, v, mask=Causal(), return_lse=True, backend="splash")
    want = attention(Q, k, v, mask=Causal(), return_lse=True, backend="jax_reference")
    np.testing.assert_allclose(out, want[0], atol=2e-6)
    np.testing.assert_allclose(lse, want[1], atol=2e-6)
    assert np.isnan(np.asarray(out)).any() and not np.isnan(np.asarray(out)).all()


def test_lowers_for_a_tpu() -> None:
    problem = Problem(
        batch=2, q_len=300, kv_len=300, heads=4, kv_heads=2, head_dim=128, dtype="bfloat16",
        device="tpu", framework="jax", grad=True,
    )  # fmt: skip
    kernel = registry["jax", "splash"].load()(problem, {})
    q, k = (jax.ShapeDtypeStruct((2, 300, heads, 128), jnp.bfloat16) for heads in (4, 2))
    mask = Causal() & Segments(jnp.arange(300) // 100)
    step = jax.grad(lambda q, k, v: kernel(q, k, v, mask).astype(jnp.float32).sum(), (0, 1, 2))
    text = jax.jit(step).trace(q, k, k).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") >= 3


def test_refusals_say_why() -> None:
    with pytest.raises(Unsupported, match="Dense"):
        attention(Q, KEY, V, mask=Dense(jnp.ones((T, S), bool)), backend="splash")
    call = jax.grad(lambda q: attention(q, KEY, V, return_lse=True, backend="splash")[1].sum())
    with pytest.raises(Unsupported, match="lse"):
        call(Q)
    # at a head dim of 2 the scale is 0.707: queries rounded after it are not those of the lse
    half = [jnp.ones((1, 1, 1, 2), jnp.bfloat16)] * 3
    with pytest.raises(Unsupported, match="powers of two"):
        attention(*half, return_lse=True, backend="splash")
    attention(*half, return_lse=True, scale=0.25, backend="splash")
    wide = Problem(
        batch=1, q_len=128, kv_len=128, heads=1, kv_heads=1, head_dim=64, device="tpu",
        framework="jax",
    )  # fmt: skip
    found = registry["jax", "splash"].capabilities_for("tpu").check(wide)
    assert [str(reason) for reason in found] == ["dtype: got float32, takes bfloat16"]
