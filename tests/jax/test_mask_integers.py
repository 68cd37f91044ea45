"""Masks of small and of unsigned integers, as tokenizers and sums of booleans give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from polyattn import BlockMap, Causal, LeftPadding, Packed, Padding, PrefixLM, Segments
from polyattn.jax import AttentionMetadata, AttentionRegistry, attention

B, T, N, H = 2, 16, 2, 8
IDS = np.repeat(np.arange(4), 4)[None].repeat(B, 0)


def draw(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


Q = draw(B, T, N, H)
MASKS = {
    "padding": lambda turn: Padding(turn([0, 5]), turn([T, 9])),
    "left padding": lambda turn: LeftPadding(turn([0, 5]), turn([0, 9])),
    "segments": lambda turn: Causal() & Segments(turn(IDS), turn(IDS)),
    "prefix": lambda turn: PrefixLM(turn([3, 9])),
    "blocks": lambda turn: BlockMap(8, 8, turn(np.zeros((B, 1, 2, 1))), turn(np.ones((B, 1, 2)))),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "uint8") for name in MASKS), *(("padding", d) for d in ("int8", "int16", "uint32"))],
)
def test_any_integers_are_taken_eagerly_compiled_and_where_gradients_are(
    name: str, dtype: str
) -> None:
    mask = MASKS[name](lambda x: jnp.asarray(x, dtype))
    plain = MASKS[name](lambda x: jnp.asarray(x, jnp.int32))
    want = attention(Q, Q, Q, mask=plain, backend="jax_reference")
    np.testing.assert_allclose(attention(Q, Q, Q, mask=mask), want, atol=2e-6)
    run = jax.jit(lambda q, mask: attention(q, q, q, mask=mask))
    np.testing.assert_allclose(run(Q, mask), want, atol=2e-6)
    of_numpy = MASKS[name](lambda x: np.asarray(x, dtype))  # traced where jit is given them
    np.testing.assert_allclose(run(Q, of_numpy), want, atol=2e-6)
    learn = jax.jit(jax.grad(lambda q, mask: attention(q, q, q, mask=mask).sum()))
    np.testing.assert_allclose(learn(Q, mask), learn(Q, plain), atol=2e-6)


@pytest.mark.parametrize("dtype", ["uint8", "uint32"])
def test_offsets_of_packed_sequences(dtype: str) -> None:
    cu, q = jnp.array([0, 6, 16], dtype), Q[0]
    want = attention(q, q, q, mask=Packed(cu.astype(jnp.int32)) & Causal(), layout="packed")
    run = jax.jit(lambda q, mask: attention(q, q, q, mask=mask, layout="packed"))
    np.testing.assert_array_equal(run(q, Packed(cu) & Causal()), want)


def test_numbers_that_int32_does_not_hold_mean_what_they_say() -> None:
    huge = jnp.uint32(2**31 + 1)
    run = jax.jit(lambda mask: attention(Q, Q, Q, mask=mask))
    far = Padding(kv_lengths=jnp.array([huge, 9], jnp.uint32))  # as if it were past all keys
    want = attention(Q, Q, Q, mask=Padding(kv_lengths=jnp.array([T, 9])))
    np.testing.assert_array_equal(run(far), want)
    ids = jnp.asarray(IDS, jnp.uint32) + huge
    want = attention(Q, Q, Q, mask=Segments(jnp.asarray(IDS)))
    np.testing.assert_array_equal(run(Segments(ids)), want)
    np.testing.assert_array_equal(attention(Q, Q, Q, mask=Segments(ids)), want)
    with jax.enable_x64(True):
        ids = jnp.asarray(IDS, jnp.uint64) + jnp.uint64(2**63 + 1)
        found = attention(Q, Q, Q, mask=Segments(ids))
    np.testing.assert_array_equal(found, want)


def test_ids_of_the_operator() -> None:
    flash = AttentionRegistry.create("flash_attn2", AttentionMetadata())
    found, want = (
        flash(Q, Q, Q, causal=True, q_segment_ids=jnp.asarray(IDS, dtype)).attention_outputs
        for dtype in (jnp.uint8, jnp.int32)
    )
    np.testing.assert_array_equal(found, want)
