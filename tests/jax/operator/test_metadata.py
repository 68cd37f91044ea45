"""Metadata of operators: what it takes, refuses, keeps, and that all of it takes effect."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from polyattn import InvalidProblem
from polyattn.jax import AttentionMetadata, AttentionOutput, AttentionRegistry, PartitionAxis

B, T, N, K, H = 2, 6, 4, 2, 8


def draw(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


Q, KEY, V = draw(0, B, T, N, H), draw(1, B, T, K, H), draw(2, B, T, K, H)


def mesh(*names: str, size: int = 1) -> Any:
    return jax.sharding.AbstractMesh((size,) * len(names), names)


def test_metadata_works_without_a_mesh() -> None:
    made = AttentionMetadata(jnp.bfloat16)
    assert (made.runtime_dtype, made.runtime_softmax_dtype) == ("bfloat16", "float32")
    assert (made.blocksize_q, made.blocksize_k, made.blocksize_b) == (512, 1024, 1)
    assert made.mesh is None and made.softmax_scale is None and made.sequence_axis_name == "sp"


def test_metadata_takes_from_a_config_what_is_not_given() -> None:
    config = SimpleNamespace(
        attn_dtype=jnp.bfloat16, blocksize_q=64, scan_attention_layers=False, sequence_axis_name="x"
    )
    made = AttentionMetadata.from_config(config, softmax_scale=0.5, dropout_prob=0.1)
    assert (made.blocksize_q, made.blocksize_k, made.scan_ring_attention) == (64, 1024, False)
    assert (made.softmax_scale, made.dropout_prob, made.runtime_dtype) == (0.5, 0.1, "bfloat16")
    assert made.sequence_axis_name == "x"
    made.set_attrs_carefully("blocksize_q", 7)
    assert made.blocksize_q == 64  # what is given stays


def test_two_axes_of_a_sequence_pass_through_plain_data() -> None:
    made = AttentionMetadata(sequence_axis_name=("ring", "heads"))
    assert AttentionMetadata.from_json(made.to_json()) == made


def test_metadata_passes_through_plain_data() -> None:
    axes = PartitionAxis(batch_axis="dp", decode_key_sequence_axis=None)
    made = AttentionMetadata(
        partition_axis=axes, mesh=mesh("dp", "sp", "tp"), soft_cap=3.0, backend="TPU"
    )
    assert AttentionMetadata.from_dict(json.loads(made.to_json(indent=1))) == made
    assert made.backend == "tpu" and made.replace(soft_cap=None).soft_cap is None


def wrong_metadata() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"backend": "npu"}, "expected one of cpu"
    yield {"backend": "tpu", "platform": "gpu"}, "expected one device"
    yield {"softmax_scale": "x"}, "expected a finite number"
    yield {"softmax_scale": math.nan}, "expected a finite number"
    yield {"soft_cap": -1.0}, "above 0"
    yield {"dropout_prob": None}, "expected 0 to 1"
    yield {"runtime_dtype": jnp.int32}, "a floating dtype"
    yield {"scan_ring_attention": "no"}, "True or False"
    yield {"sequence_axis_name": None}, "the name of a mesh axis"
    yield {"blocksize_q": 2.5}, "a size of 1 or more"
    yield {"blocksize_b": 4}, "no implementation cuts the batch"
    yield {"partition_manager": object()}, "whose `paxis` is"
    yield {"blocksize_q": 0}, "a size of 1 or more"
    yield {"dropout_prob": 2.0}, "expected 0 to 1"
    yield {"runtime_dtype": "flaot32"}, "one that JAX knows"
    yield {"runtime_softmax_dtype": jnp.bfloat16}, "in float32 at least"
    yield {"mesh": 3}, r"a jax\.sharding\.Mesh"
    yield {"partition_axis": "dp"}, "PartitionAxis"
    yield {"mesh": mesh("dp"), "partition_axis": PartitionAxis()}, "got the axis 'fsdp'"


@pytest.mark.parametrize(("fields", "message"), list(wrong_metadata()))
def test_metadata_that_means_nothing_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionMetadata(**fields)
    with pytest.raises(ValueError, match="Did you mean 'soft_cap'"):
        AttentionMetadata().replace(soft_cup=1.0)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_mesh_passes_through_plain_data_as_it_is(kind: str) -> None:
    kinds = (jax.sharding.AxisType[kind],)
    real = jax.sharding.Mesh(np.array(jax.devices()[-1:]), ("tp",), axis_types=kinds)
    for one in (real, jax.sharding.AbstractMesh((4,), ("tp",), axis_types=kinds)):
        made = AttentionMetadata(mesh=one)
        again = AttentionMetadata.from_json(made.to_json())
        assert again == made and again.mesh.axis_types == kinds
    lost = AttentionMetadata(mesh=real).to_dict()
    lost["mesh"]["mesh"]["devices"] = [1 << 20]  # which this machine has not
    there = AttentionMetadata.from_dict(lost).mesh
    assert isinstance(there, jax.sharding.AbstractMesh) and there.shape == real.shape


def test_numbers_of_numpy_and_a_partition_manager_pass_through_plain_data() -> None:
    axes = PartitionAxis(batch_axis="dp")
    made = AttentionMetadata(
        softmax_scale=np.float32(0.5), soft_cap=jnp.float32(2.0), blocksize_k=np.int64(64),
        partition_manager=SimpleNamespace(paxis=axes),
    )  # fmt: skip
    assert made.partition_axis == axes and made.get_shardings("__train__")[0][0] == "dp"
    assert AttentionMetadata.from_json(made.to_json()) == made
    assert AttentionMetadata.from_config({"soft_cap": 7}).soft_cap == 7.0
    for text, message in (("[]", "expected fields by name"), ("{", "got no JSON")):
        with pytest.raises(InvalidProblem, match=message):
            AttentionMetadata.from_json(text)
        with pytest.raises(InvalidProblem, match=message):
            AttentionOutput.from_json(text)
    held = AttentionOutput(cache_view={"keys": KEY, "length": 3})
    again = AttentionOutput.from_json(held.to_json()).cache_view
    np.testing.assert_array_equal(again["keys"], KEY)
    assert again["length"] == 3
    with pytest.raises(InvalidProblem, match="got a field of type object"):
        AttentionOutput(cache_view=object()).to_dict()


# What is given takes effect, or is refused ------------------------------------------------------


def program(name: str, **fields: Any) -> str:
    impl = AttentionRegistry.create(name, AttentionMetadata(**fields))
    return str(jax.make_jaxpr(lambda q: impl(q, KEY, V).attention_outputs)(Q))


def test_sizes_of_blocks_reach_the_backends_that_have_them() -> None:
    usual = program("blockwise")
    for fields in ({"blocksize_q": 2}, {"blocksize_k": 3}, {"platform": "jax"}):
        assert (program("blockwise", **fields) == usual) == ("platform" in fields)
    impl = AttentionRegistry.create("blockwise", AttentionMetadata(blocksize_q=2, blocksize_k=3))
    want = AttentionRegistry.create("vanilla", AttentionMetadata())(Q, KEY, V, causal=True)
    found = impl(Q, KEY, V, causal=True).attention_outputs
    np.testing.assert_allclose(found, want.attention_outputs, atol=2e-6)

    def loss(impl: Any) -> Any:
        return jax.grad(lambda q: (impl(q, KEY, V).attention_outputs ** 2).sum())(Q)

    vanilla = AttentionRegistry.create("vanilla", AttentionMetadata())
    np.testing.assert_allclose(loss(impl), loss(vanilla), atol=1e-5)
    for name in ("vanilla", "native_cpu"):
        with pytest.raises((InvalidProblem, ValueError), match=r"block_q=2 for|native_cpu"):
            program(name, blocksize_q=2)


def test_a_platform_says_what_runs() -> None:
    assert program("flash_attn2", platform="xla") == program("blockwise")
    with pytest.raises(InvalidProblem, match="platform='pallas' for 'blockwise'"):
        program("blockwise", platform="pallas")
    with pytest.raises(InvalidProblem, match="got metadata for tpu and a call on cpu"):
        program("blockwise", platform="tpu")


@pytest.mark.parametrize("backend", ["gpu", "cuda", "rocm", "tpu"])
def test_a_device_that_is_not_there_is_no_cpu(backend: str) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("for machines that have processors alone")
    for name in ("vanilla", "flash_attn2"):
        impl = AttentionRegistry.create(name, AttentionMetadata(backend=backend))
        with pytest.raises(InvalidProblem, match=f"for {backend} and a call on cpu"):
            impl(Q, KEY, V)
        with pytest.raises(InvalidProblem, match=r"jax\.device_put"):
            jax.jit(impl)(Q, KEY, V)


def test_a_softmax_in_float64_is_for_calls_in_float64() -> None:
    with pytest.raises(InvalidProblem, match="runtime_dtype='float64' too"):
        program("vanilla", runtime_softmax_dtype="float64")
    with jax.enable_x64(True):
        made = AttentionMetadata("float64", "float64")
        out = AttentionRegistry.create("vanilla", made)(Q, KEY, V).attention_outputs
    assert out.dtype == np.float64


def test_pages_are_read_in_the_runtime_dtype() -> None:
    impl = AttentionRegistry.create("paged_attention", AttentionMetadata("bfloat16"))
    pages, table, lengths = draw(3, 4, 16, 2, 32), jnp.array([[0, 1]]), jnp.array([20])
    out = impl(draw(4, 1, 1, 4, 32), pages, pages, table, lengths).attention_outputs
    assert out.dtype == jnp.bfloat16
    with pytest.raises(InvalidProblem, match="expected one of __train__"):
        impl(draw(4, 1, 1, 4, 32), pages, pages, table, lengths, mode="decode")
    sized = AttentionRegistry.create("paged_attention", AttentionMetadata(blocksize_k=8))
    with pytest.raises(InvalidProblem, match="for keys in pages"):
        sized(draw(4, 1, 1, 4, 32), pages, pages, table, lengths)
