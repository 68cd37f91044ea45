"""The operator layer by name: metadata, modes, specs, registry, implementations, outputs."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax.sharding import PartitionSpec

import polyattn.jax
from polyattn import Causal, InvalidProblem, Padding, PolyattnError, Unsupported
from polyattn.jax import (
    AttentionImpl,
    AttentionMetadata,
    AttentionOutput,
    AttentionRegistry,
    PartitionAxis,
    attention,
)
from polyattn.jax.operator.call_arguments import window_of
from polyattn.jax.sharding.modes import MODES
from polyattn.native import module
from polyattn.selection.registry import Available

B, T, N, K, H = 2, 6, 4, 2, 8
NAMES = [  # those that need neither a mesh nor pages
    name
    for name in AttentionRegistry.list_implementations()
    if name not in ("ring", "ulysses", "hybrid", "ring_ulysses", "paged_attention")
    and (name != "native_cpu" or isinstance(module.status(), Available))
]


def draw(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


Q, KEY, V = draw(0, B, T, N, H), draw(1, B, T, K, H), draw(2, B, T, K, H)


def mesh(*names: str, size: int = 1) -> Any:
    return jax.sharding.AbstractMesh((size,) * len(names), names)


# Names ------------------------------------------------------------------------------------------


def test_the_names_of_the_newest_version_are_the_same_things() -> None:
    for name in ("Impl", "Metadata", "Output", "Registry"):
        old, new = (getattr(polyattn.jax, f"{first}{name}") for first in ("Attention", "Operation"))
        assert old is new


def test_every_name_of_the_document_is_there() -> None:
    for name in (
        "forward_native", "forward_tpu", "forward_gpu", "forward_cpu", "forward_cuda",
        "forward_rocm", "get_impl_name", "get_impl_metadata", "current_backend", "get_mode",
        "repeat_kv_heads", "create_stable_sharding", "get_requirements",
    ):  # fmt: skip
        assert callable(getattr(AttentionImpl, name))
    for kind in (AttentionMetadata, AttentionOutput):
        for name in ("to_dict", "from_dict", "to_json", "from_json", "replace"):
            assert callable(getattr(kind, name))
    assert {"vanilla", "sdpa", "cudnn", "flash_attn2", "blockwise"} <= set(NAMES)


# Specs ------------------------------------------------------------------------------------------


def test_specs_differ_by_mode_where_they_must() -> None:
    made = AttentionMetadata()
    found = {mode: made.get_shardings(mode) for mode in MODES}
    batch = ("fsdp", "dp")
    assert found["__train__"][0] == PartitionSpec(batch, "sp", "tp", None)
    assert found["__autoregressive__"][0] == PartitionSpec(batch, None, "tp", None)
    assert found["__autoregressive__"][1] == PartitionSpec(batch, "sp", "tp", None)
    assert found["__autoregressive__"][3] == PartitionSpec(batch, "tp", None, "sp")
    assert found["__train__"][3] == PartitionSpec(batch, "tp", "sp", None)  # by head
    assert found["__train__"][5] == found["__train__"][0]


def test_layouts_and_what_only_they_have() -> None:
    made = AttentionMetadata()
    rules = made.get_shardings("__prefill__", layout="bhtd", softmax_aux=jnp.ones((4, 2)))
    assert rules.query == PartitionSpec(("fsdp", "dp"), "tp", "sp", None)
    assert made.get_shardings("__prefill__", False)[0] == rules.query
    assert rules.softmax_aux == PartitionSpec("tp", None)
    assert rules.q_segment_ids == PartitionSpec(("fsdp", "dp"), "sp")
    packed = made.get_shardings("__train__", layout="thd", softmax_aux=[0.5, 1.0])
    assert packed.query == PartitionSpec(None, "tp", None)
    assert packed.q_segment_ids == PartitionSpec(None) == packed.kv_segment_ids
    assert packed.bias == PartitionSpec(None, "tp", None, None)
    assert packed.softmax_aux == PartitionSpec("tp")
    with pytest.raises(InvalidProblem, match="'dp' for dims 0 and 0"):
        twice = PartitionAxis(batch_axis=("dp", "dp"))
        AttentionMetadata(partition_axis=twice).get_shardings("__train__")
    many = PartitionAxis(head_axis=("tp", "ep"), kv_head_axis=None)
    made = AttentionMetadata(partition_axis=many)
    assert made.get_shardings("__train__")[1][2] is None
    assert made.get_shardings("__train__", qkv_mni_sharding=True)[1][2] == ("tp", "ep")


def test_none_takes_an_axis_away_and_no_axis_comes_twice() -> None:
    twice = PartitionAxis(decode_head_axis=("tp", "sp"), decode_query_sequence_axis="sp")
    with pytest.raises(InvalidProblem, match="'sp' for dims 1 and 2 of query"):
        AttentionMetadata(partition_axis=twice).get_shardings("__autoregressive__")
    once = PartitionAxis(
        decode_batch_axis="dp", decode_head_axis=("tp", "sp"), decode_kv_head_axis=("tp", "sp"),
        decode_key_sequence_axis=None,
    )  # fmt: skip
    q, k, *_ = AttentionMetadata(partition_axis=once).get_shardings("__autoregressive__")
    assert q == PartitionSpec("dp", None, ("tp", "sp"), None) == k
    with pytest.raises(InvalidProblem, match="Did you mean '__train__'"):
        AttentionMetadata().get_shardings("train")
    with pytest.raises(InvalidProblem, match="expected one of bthd"):
        AttentionMetadata().get_shardings("__train__", layout="btnh")


def test_axes_that_a_mesh_lacks_are_left_out_where_none_were_asked_for() -> None:
    made = AttentionMetadata(mesh=mesh("dp", "tp"))
    assert made.get_shardings("__train__")[0] == PartitionSpec("dp", None, "tp", None)


# Implementations --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_implementation_computes_attention(name: str) -> None:
    impl = AttentionRegistry.create(name, AttentionMetadata())
    found = jax.jit(lambda q, k, v: impl(q, k, v, causal=True, return_lse=True))(Q, KEY, V)
    want, lse = attention(Q, KEY, V, mask=Causal(), return_lse=True, backend="jax_reference")
    np.testing.assert_allclose(found.attention_outputs, want, atol=2e-6)
    np.testing.assert_allclose(found.lse, lse, atol=2e-6)
    assert impl.get_impl_metadata() is impl.metadata and found.attention_weights is None


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_arrives(name: str) -> None:
    made = AttentionMetadata(softmax_scale=0.3, soft_cap=2.0)
    impl, sinks, bias = AttentionRegistry.create(name, made), draw(3, N), draw(4, 1, N, T, T)
    ids = jnp.arange(T) // 4
    found = impl(
        Q, KEY, V, mask=Padding(kv_lengths=jnp.array([3, 5])), sliding_window=(2, 0),
        init_bias=lambda: bias, softmax_aux=sinks, q_segment_ids=ids, kv_segment_ids=ids,
        return_weights=True,
    )  # fmt: skip
    mask = Padding(kv_lengths=jnp.array([3, 5])) & window_of((2, 0)) & polyattn.Segments(ids, ids)
    want = attention(
        Q, KEY, V, mask=mask, bias=polyattn.DenseBias(bias), scale=0.3, softcap=2.0, sinks=sinks,
        backend="jax_reference",
    )  # fmt: skip
    np.testing.assert_allclose(found.attention_outputs, want, atol=2e-6)
    values = jnp.repeat(V, N // K, 2)
    told = jnp.einsum("bnts,bsnh->btnh", found.attention_weights, values)
    np.testing.assert_allclose(told, want, atol=2e-6)


def test_packed_rows_and_heads_second() -> None:
    impl = AttentionRegistry.create("blockwise", AttentionMetadata())
    cu = jnp.array([0, 2, 6])
    out = impl(Q[0], KEY[0], V[0], cum_seqlens_q=cu, causal=True).attention_outputs
    alone = impl(Q[:1, 2:], KEY[:1, 2:], V[:1, 2:], causal=True).attention_outputs
    np.testing.assert_allclose(out[2:], alone[0], atol=2e-6)
    turned = impl(*(x.swapaxes(1, 2) for x in (Q, KEY, V)), BTHD=False).attention_outputs
    np.testing.assert_allclose(turned.swapaxes(1, 2), impl(Q, KEY, V).attention_outputs, atol=2e-6)


def test_dropout_is_for_training() -> None:
    impl = AttentionRegistry.create("vanilla", AttentionMetadata(dropout_prob=0.5))
    plain = impl(Q, KEY, V).attention_outputs
    np.testing.assert_array_equal(plain, impl(Q, KEY, V, deterministic=True).attention_outputs)
    key = jax.random.key(0)
    dropped = impl(Q, KEY, V, deterministic=False, dropout_rng=key).attention_outputs
    assert not np.array_equal(plain, dropped)
    with pytest.raises(InvalidProblem, match="dropout_key"):
        impl(Q, KEY, V, deterministic=False)


def test_the_backend_of_the_metadata_is_the_one_that_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = []

    class Told(AttentionImpl):
        @classmethod
        def get_impl_name(cls) -> str:
            return "told"

        def forward_native(self, *args: Any, **kwargs: Any) -> AttentionOutput:
            called.append("native")
            return AttentionOutput()

        def forward_cpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
            called.append("cpu")
            return AttentionOutput()

        def forward_gpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
            called.append("gpu")
            return AttentionOutput()

    for backend in ("cpu", "gpu", "cuda", "rocm", "tpu"):
        where = "cuda" if backend == "gpu" else backend
        with monkeypatch.context() as elsewhere:  # devices that this machine has not
            elsewhere.setattr("polyattn.jax.operator.impl.device_of", lambda x, where=where: where)
            Told(AttentionMetadata(backend=backend))(Q, KEY, V)
    assert called == ["cpu", "gpu", "gpu", "gpu", "native"]
    Told(AttentionMetadata())(Q, KEY, V)
    assert called[-1] == Told(AttentionMetadata()).current_backend() == jax.default_backend()
    if isinstance(module.status(), Available):
        impl = AttentionRegistry.create("native_cpu", AttentionMetadata(dropout_prob=0.5))
        with pytest.raises(Unsupported, match="dropout"):  # strict: no other backend steps in
            impl(Q, KEY, V, deterministic=False, dropout_rng=jax.random.key(0))


# Registry ---------------------------------------------------------------------------------------


def test_the_registry_knows_names_once() -> None:
    class Mine(AttentionImpl):
        @classmethod
        def get_impl_name(cls) -> tuple[str, ...]:
            return "mine", "also_mine"

        def forward_native(self, *args: Any, **kwargs: Any) -> AttentionOutput:
            return AttentionOutput()

    try:
        assert AttentionRegistry.register(Mine) is Mine is AttentionRegistry.register(Mine)
        assert AttentionRegistry.get("also_mine") is AttentionRegistry.get("mine") is Mine
        metadata = AttentionMetadata()
        assert AttentionRegistry.create("mine", metadata).metadata is metadata

        class Other(Mine):
            pass

        with pytest.raises(PolyattnError, match="a second implementation called 'mine'"):
            AttentionRegistry.register(Other)
    finally:
        for name in ("mine", "also_mine"):
            AttentionRegistry._impls.pop(name, None)
    with pytest.raises(ValueError, match="Did you mean 'flash'"):
        AttentionRegistry.get("flsh")
    with pytest.raises(InvalidProblem, match="expected AttentionMetadata"):
        AttentionRegistry.create("vanilla", {})  # type: ignore[arg-type]


# Helpers ----------------------------------------------------------------------------------------


def test_implementations_pass_through_pickle() -> None:
    for name in AttentionRegistry.list_implementations()[:3]:
        impl = AttentionRegistry.create(name, AttentionMetadata(softmax_scale=0.5))
        again = pickle.loads(pickle.dumps(impl))
        assert type(again) is type(impl) and again.metadata == impl.metadata


def test_helpers_of_implementations() -> None:
    impl = AttentionRegistry.create("vanilla", AttentionMetadata())
    assert impl.get_mode(Q[:, :1]) == "__autoregressive__" and impl.get_mode(Q) == "__train__"
    assert impl.get_mode(Q[:, :1], mode="__prefill__") == "__prefill__"
    assert impl.get_mode(Q[:, :1].swapaxes(1, 2), BTHD=False) == "__autoregressive__"
    k, v = impl.repeat_kv_heads(KEY, V, 2)
    np.testing.assert_array_equal(k[:, :, 1], KEY[:, :, 0])
    assert v.shape == (B, T, N, H)
    assert impl.get_requirements("__autoregressive__")["cache"]
    assert not impl.get_requirements("__train__")["cache"]
    rows, keys = jnp.arange(T)[None] < 4, jnp.arange(T)[None] < 5
    both = impl._combine_query_kv_masks(rows, keys)
    found = impl._split_attention_mask(both)
    np.testing.assert_array_equal(found[0], rows)
    np.testing.assert_array_equal(found[1], keys)
    causal = impl._create_causal_mask(3, 5)
    assert np.asarray(causal).sum(1).tolist() == [3, 4, 5]
    with pytest.raises(InvalidProblem, match="no product of rows and keys"):
        impl._split_attention_mask(causal[None, None])
    assert impl._handle_kvhead(draw(5, B, K, T, T), N, K).shape == (B, N, T, T)
    with pytest.raises(InvalidProblem, match="for 3 heads"):
        impl._handle_kvhead(draw(5, B, 3, T, T), N, K)


def test_a_stable_spec_never_loses_an_axis_without_a_word() -> None:
    impl = AttentionRegistry.create("vanilla", AttentionMetadata(mesh=mesh("dp", "tp", size=4)))
    whole = PartitionSpec("dp", None, "tp")
    assert impl.create_stable_sharding(whole) == whole
    assert impl.create_stable_sharding(whole, [0]) == PartitionSpec("dp", None, None)
    assert (
        impl.create_stable_sharding(whole, [2], clone_ps=PartitionSpec(None, None, "dp"))[2] == "dp"
    )
    assert impl.create_stable_sharding(whole, dep=None) is None
    with pytest.raises(InvalidProblem, match="'dp', which is 4 devices"):
        impl.create_stable_sharding(whole, tensor=jnp.ones((6, 2, 8)))
    with pytest.raises(InvalidProblem, match="'tp' for dims 0 and 1 of the tensor"):
        impl.create_stable_sharding(whole, [0, 1], clone_ps=PartitionSpec("tp", "tp"))
    with pytest.raises(InvalidProblem, match="no longer than its rank"):
        impl.create_stable_sharding(whole, tensor=jnp.ones(4))
    with pytest.raises(InvalidProblem, match="expected one of the mesh's: dp, tp"):
        impl.create_stable_sharding(PartitionSpec("sp"))


def test_outputs_pass_through_transformations_and_plain_data() -> None:
    made = AttentionOutput(attention_outputs=Q.astype(jnp.bfloat16), lse=draw(6, B, N, T))
    again = AttentionOutput.from_json(made.to_json())
    assert again.attention_outputs.dtype == jnp.bfloat16 and again.attention_weights is None
    np.testing.assert_array_equal(again.lse, made.lse)
    assert len(jax.tree_util.tree_leaves(jax.jit(lambda x: x)(made))) == 2
    assert made.replace(lse=None).lse is None


def test_a_cache_of_layers_passes_through_plain_data() -> None:
    made = AttentionOutput(cache_view=[(KEY, V), {"lengths": jnp.arange(B)}])
    again = AttentionOutput.from_json(made.to_json()).cache_view
    np.testing.assert_array_equal(again[0][1], V)
    np.testing.assert_array_equal(again[1]["lengths"], jnp.arange(B))


@pytest.mark.parametrize(
    "value", [jnp.ones(2, jnp.complex64), jax.random.key(0)], ids=["complex", "key"]
)
def test_what_is_no_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(InvalidProblem, match="expected real numbers"):
        AttentionOutput(lse=value).to_json()


@pytest.mark.parametrize(
    "field",
    [
        {"array": [1, 2]},
        {"array": [1], "shape": [1], "dtype": "float99"},
        {"mesh": {"axes": {"dp": 1}, "types": ["Else"], "devices": None}},
        {"axes": 5},
    ],
)
def test_plain_data_of_others_is_refused(field: Any) -> None:
    with pytest.raises(InvalidProblem, match=r"to_dict\(\) gives"):
        AttentionOutput.from_dict({"lse": field})


def wrong_calls() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"precision": "highest"}, "expected None"
    yield {"mask": jnp.ones((T, T))}, "an array of booleans"
    yield {"kv_segment_ids": jnp.arange(T)}, "got kv_segment_ids alone"
    yield {"cum_seqlens_k": jnp.arange(3)}, "got cum_seqlens_k alone"
    yield {"mode": "decode"}, "expected one of __train__"
    yield {"sliding_window": 2.5}, "a count of other keys"
    yield {"sliding_window": (1, 2, 3)}, "a count of other keys"
    yield {"causal": "no"}, "True or False"
    yield {"softmax_scale": "x"}, "a finite number"
    yield {"init_bias": 3}, "a function that makes"


@pytest.mark.parametrize(("options", "message"), list(wrong_calls()))
def test_wrong_calls_are_refused(options: dict[str, Any], message: str) -> None:
    impl = AttentionRegistry.create("vanilla", AttentionMetadata())
    with pytest.raises(InvalidProblem, match=message):
        impl(Q, KEY, V, **options)
    with pytest.raises(TypeError):
        impl(Q, KEY, V, no_such_argument=1)


def test_wrong_arrays_and_modes_are_refused_by_name() -> None:
    cast = AttentionRegistry.create("blockwise", AttentionMetadata("bfloat16"))
    with pytest.raises(InvalidProblem, match="got query of type list"):
        cast([1.0], KEY, V)
    with pytest.raises(InvalidProblem, match="got value of type float"):
        cast(Q, KEY, 3.0)
    impl = AttentionRegistry.create("blockwise", AttentionMetadata())
    with pytest.raises(InvalidProblem, match="known while tracing"):
        jax.jit(lambda scale: impl(Q, KEY, V, softmax_scale=scale))(0.5)
    cu = jnp.array([0, 2, 6])
    with pytest.raises(InvalidProblem, match="expected one of __train__"):
        impl(Q[0], KEY[0], V[0], cum_seqlens_q=cu, mode="bogus")
    with pytest.raises(InvalidProblem, match="expected four dims"):
        impl.get_mode(Q[0])
    over_shapes = AttentionRegistry.create("blockwise", AttentionMetadata(mesh=mesh("dp", size=2)))
    with pytest.raises(InvalidProblem, match="An AbstractMesh is for specs alone"):
        over_shapes(Q, KEY, V)
    for wrong in (None, ["vanilla"]):
        with pytest.raises(InvalidProblem, match="expected one of"):
            AttentionRegistry.get(wrong)  # type: ignore[arg-type]
    with pytest.raises(PolyattnError, match="a subclass of AttentionImpl"):
        AttentionRegistry.register(int)  # type: ignore[type-var]


def test_weights_are_those_of_the_call() -> None:
    impl = AttentionRegistry.create("vanilla", AttentionMetadata(dropout_prob=0.5))
    found = impl(Q, KEY, V, softmax_scale=0.0, return_weights=True)
    values = jnp.repeat(V, N // K, 2)
    told = jnp.einsum("bnts,bsnh->btnh", found.attention_weights, values)
    np.testing.assert_allclose(told, found.attention_outputs, atol=2e-6)
    with pytest.raises(InvalidProblem, match="return_weights with dropout"):
        impl(Q, KEY, V, deterministic=False, dropout_rng=jax.random.key(0), return_weights=True)
    listed = impl(Q, KEY, V, softmax_aux=[0.5] * N, sliding_window=np.int64(3))
    as_array = impl(Q, KEY, V, softmax_aux=jnp.full(N, 0.5), sliding_window=3)
    np.testing.assert_array_equal(listed.attention_outputs, as_array.attention_outputs)
