"""Operators over eight virtual devices: one result, whatever the mesh; clear errors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("jax")

PROGRAM = """
import itertools
import jax, jax.numpy as jnp, numpy as np
from polyattn import Alibi, BlockMap, Causal, Dense, DenseBias, InvalidProblem, Padding
from polyattn import Segments, Window
from polyattn.jax import AttentionMetadata, AttentionRegistry, PartitionAxis, attention

assert jax.device_count() == 8
B, T, N, K, H = 4, 8, 8, 4, 8
draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
q, k, v = draw(0, B, T, N, H), draw(1, B, T, K, H), draw(2, B, T, K, H)
masks = [
    None, Causal() & Window(left=3), Padding(kv_lengths=jnp.array([3, 8, 1, 0])),
    Segments(jnp.arange(T) // 3), Segments(jnp.arange(B * T).reshape(B, T) // 5),
    Dense(draw(3, B, N, T, T) > 0), Dense(draw(3, 1, 1, T, T) > 0),
    BlockMap(4, 4, jnp.zeros((1, N, 2, 1), jnp.int32), jnp.ones((1, N, 2), jnp.int32)),
]
by_head, by_batch = draw(4, 1, N, T, T), draw(4, B, 1, T, T)
biases = [None, Alibi(jnp.arange(N) / 8.0), DenseBias(by_head), DenseBias(by_batch)]
sinks = draw(5, N, 2)
implicit = (jax.sharding.AxisType.Auto,) * 3
meshes = [
    jax.make_mesh((2, 2, 2), ("dp", "tp", "sp"), axis_types=implicit),
    jax.make_mesh((2, 4), ("dp", "tp")),
]
name = "NAME"
for mesh, mask, bias in itertools.product(meshes, masks, biases):
    if mesh is meshes[1] and bias is not biases[2]:
        continue
    if name == "blockwise" and mask is not None and bias is not None:
        continue  # each with each is for the other one
    impl = AttentionRegistry.create(name, AttentionMetadata(mesh=mesh))

    def loss(q, k, v, sinks):
        found = impl(q, k, v, mask=mask, bias=bias, softmax_aux=sinks, return_lse=True)
        return (found.attention_outputs ** 2).sum(), found

    def plain(q, k, v, sinks):
        out, lse = attention(q, k, v, mask=mask, bias=bias, sinks=sinks, return_lse=True,
                             backend="jax_reference")
        return (out ** 2).sum(), (out, lse)

    every = (0, 1, 2, 3)
    learn = jax.jit(jax.value_and_grad(loss, every, has_aux=True))
    (_, found), grads = learn(q, k, v, sinks)
    (_, (out, lse)), want = jax.value_and_grad(plain, every, has_aux=True)(q, k, v, sinks)
    np.testing.assert_allclose(found.attention_outputs, out, atol=3e-6)
    np.testing.assert_allclose(found.lse, lse, atol=3e-6)
    for a, b in zip(grads, want):
        np.testing.assert_allclose(a, b, atol=3e-5)
    if mesh is meshes[0]:
        assert found.attention_outputs.sharding.spec[2] == "tp"

impl = AttentionRegistry.create(name, AttentionMetadata(mesh=meshes[0]))
few = k[:, :, :1], v[:, :, :1]
for given, message in (((q[:3], k[:3], v[:3]), "2 devices"), ((q, *few), "1 key/value heads")):
    try:
        impl(*given)
    except InvalidProblem as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)
whole = PartitionAxis(batch_axis="dp", sequence_axis=None, head_axis=None, kv_head_axis=None)
impl = AttentionRegistry.create(name, AttentionMetadata(mesh=meshes[0], partition_axis=whole))
assert impl(q, k[:, :, :1], v[:, :, :1]).attention_outputs.shape == q.shape
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flash_attn2", "blockwise"])
def test_one_result_whatever_the_number_of_devices(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("NAME", name)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    )
    assert done.stdout.strip() == "right", done.stderr[-3000:]


PAGED = """
import jax, jax.numpy as jnp, numpy as np
from polyattn import InvalidProblem
from polyattn.jax import AttentionMetadata, AttentionRegistry, paged_attention

draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
q, k, v = draw(0, 4, 1, 8, 16), draw(1, 6, 8, 4, 16), draw(2, 6, 8, 4, 24)
table, lengths = jnp.array([[0, 1], [5, 2], [3, 0], [4, 4]]), jnp.array([16, 3, 0, 9])
sinks = draw(3, 8)
out, lse = paged_attention(q, k, v, table, lengths, sinks=sinks, return_lse=True)
implicit = (jax.sharding.AxisType.Auto,) * 3
for mesh in (
    jax.make_mesh((2, 2, 2), ("dp", "tp", "sp"), axis_types=implicit),
    jax.make_mesh((2, 4), ("dp", "tp")),
):
    impl = AttentionRegistry.create("paged_attention", AttentionMetadata(mesh=mesh))
    run = jax.jit(lambda *x: impl(*x, softmax_aux=sinks, return_lse=True))
    found = run(q, k, v, table, lengths)
    np.testing.assert_allclose(found.attention_outputs, out, atol=2e-6)
    np.testing.assert_allclose(found.lse, lse, atol=2e-6)
try:
    impl(q, k[:, :, :2], v[:, :, :2], table, lengths)
except InvalidProblem as error:
    assert "4 devices" in str(error) or "multiple" in str(error), error
else:
    raise AssertionError
print("right")
"""


@pytest.mark.slow
def test_pages_lie_with_the_heads_that_read_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PAGED],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    )
    assert done.stdout.strip() == "right", done.stderr[-3000:]
