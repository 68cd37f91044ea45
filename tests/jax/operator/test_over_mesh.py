"""Operators over eight virtual devices: one result, whatever the mesh; clear errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("jax")

from polyattn.native import module
from polyattn.selection.registry import Available
from tests.jax.several_devices import seeing

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from polyattn import Alibi, BlockMap, Causal, Dense, DenseBias, InvalidProblem, Padding
from polyattn import Chunked, LeftPadding, Segments, Window
from polyattn.jax import AttentionMetadata, AttentionRegistry, PartitionAxis, attention

assert jax.device_count() == 8
B, T, N, K, H = 4, 8, 8, 4, 8
draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
q, k, v = draw(0, B, T, N, H), draw(1, B, T, K, H), draw(2, B, T, K, H)
masks = [
    None, Causal() & Window(left=3), Padding(kv_lengths=jnp.array([3, 8, 1, 0])),
    LeftPadding(q_starts=jnp.array([0, 3, 8, 1]), kv_starts=jnp.array([0, 3, 1, 8])) & ~Chunked(3),
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
# what lies where is asked of each array of a mask or bias by itself: not every pair is compiled
asked = []
for number, mask in enumerate(masks):
    given = biases if mask is None else [None, biases[1], biases[2 + number % 2]]
    asked += [("flash_attn2", meshes[0], mask, bias) for bias in given]
    given = (biases[2],) if number in (0, 1, 6) else (biases[1],)
    asked += [("flash_attn2", meshes[1], mask, bias) for bias in given]
    asked += [("blockwise", meshes[0], mask, bias) for bias in (biases if mask is None else [None])]
asked.append(("blockwise", meshes[1], None, biases[2]))
every, wanted = (0, 1, 2, 3), {}
for name, mesh, mask, bias in asked:
    impl = AttentionRegistry.create(name, AttentionMetadata(mesh=mesh))

    def loss(q, k, v, sinks):
        found = impl(q, k, v, mask=mask, bias=bias, softmax_aux=sinks, return_lse=True)
        return (found.attention_outputs ** 2).sum(), found

    def plain(q, k, v, sinks):
        out, lse = attention(q, k, v, mask=mask, bias=bias, sinks=sinks, return_lse=True,
                             backend="jax_reference")
        return (out ** 2).sum(), (out, lse)

    learn = jax.jit(jax.value_and_grad(loss, every, has_aux=True))
    (_, found), grads = learn(q, k, v, sinks)
    pair = id(mask), id(bias)
    if pair not in wanted:
        wanted[pair] = jax.value_and_grad(plain, every, has_aux=True)(q, k, v, sinks)
    (_, (out, lse)), want = wanted[pair]
    told = f"{name}, {mesh}, {mask}, {bias}"
    np.testing.assert_allclose(found.attention_outputs, out, atol=3e-6, err_msg=told)
    np.testing.assert_allclose(found.lse, lse, atol=3e-6, err_msg=told)
    for a, b in zip(grads, want):
        np.testing.assert_allclose(a, b, atol=3e-5, err_msg=told)
    if mesh is meshes[0]:
        assert found.attention_outputs.sharding.spec[2] == "tp", told

whole = PartitionAxis(batch_axis="dp", sequence_axis=None, head_axis=None, kv_head_axis=None)
for name in ("flash_attn2", "blockwise"):
    impl = AttentionRegistry.create(name, AttentionMetadata(mesh=meshes[0]))
    for given, message in (((q[:3], k[:3], v[:3]), "2 devices"), ((q[:, :, :3],) * 3, "2 devices")):
        try:
            impl(*given)
        except InvalidProblem as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)
    impl = AttentionRegistry.create(name, AttentionMetadata(mesh=meshes[0], partition_axis=whole))
    assert impl(q, k[:, :, :1], v[:, :, :1]).attention_outputs.shape == q.shape
print("right")
"""


@pytest.mark.slow
def test_one_result_whatever_the_number_of_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=seeing(8)
    )
    assert done.stdout.strip() == "right", done.stderr[-3000:]


HEADS = """
import itertools
import jax, jax.numpy as jnp, numpy as np
from polyattn import Causal, DenseBias
from polyattn.jax import AttentionMetadata, AttentionRegistry, PartitionAxis, attention

draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
T, H = 5, 8
bare = dict(batch_axis=None, sequence_axis=None, head_axis=None, kv_head_axis=None)
axes = (None, "a", ("a", "b"), ("b", "a"))
for N, K in ((8, 4), (8, 1), (8, 2), (24, 3)):
    q, k, v = draw(0, 2, T, N, H), draw(1, 2, T, K, H), draw(2, 2, T, K, H)
    bias, sinks = draw(3, 1, N, T, T), draw(4, N)
    every = dict(bias=DenseBias(bias), sinks=sinks, mask=Causal(), backend="jax_reference")
    want, lse = attention(q, k, v, return_lse=True, **every)

    def loss(f):
        return jax.jit(jax.grad(lambda q, k, v: (f(q, k, v) ** 2).sum(), (0, 1, 2)))(q, k, v)

    slopes = loss(lambda q, k, v: attention(q, k, v, **every))
    # where keys are stored is one question, how heads divide another
    heads = axes if K == 4 else (("a", "b"), ("a", "b", "c"))
    for head, kv in itertools.product(heads, (None, "a", "b") if K == 4 else (None,)):
        kind = "decode_" if K == 2 else ""
        named = {f"{kind}head_axis": head, f"{kind}kv_head_axis": kv}
        made = AttentionMetadata(mesh=mesh, partition_axis=PartitionAxis(**{**bare, **named}))
        impl = AttentionRegistry.create("vanilla", made)

        def run(q, k, v, mode):
            return impl(q, k, v, causal=True, bias=bias, softmax_aux=sinks, mode=mode,
                        return_lse=True)

        for mode in ("__autoregressive__", "__insert__") if kind else ("__train__",):
            found = jax.jit(run, static_argnums=3)(q, k, v, mode)
            told = f"{N}/{K} heads, {named}, {mode}"
            np.testing.assert_allclose(found.attention_outputs, want, atol=3e-6, err_msg=told)
            np.testing.assert_allclose(found.lse, lse, atol=3e-6, err_msg=told)
        if kv is None and head == ("a", "b"):
            for one, other in zip(loss(lambda *x: run(*x, mode).attention_outputs), slopes):
                np.testing.assert_allclose(one, other, atol=3e-5, err_msg=told)
for named in (
    {"attention_dim_axis": "a"},
    {"attention_dim_axis": "a", "attention_kv_dim_axis": "b", "head_axis": "c"},
):
    made = AttentionMetadata(mesh=mesh, partition_axis=PartitionAxis(**{**bare, **named}))
    for layout in (True, False):
        given = [x if layout else x.swapaxes(1, 2) for x in (q, k, v)]
        impl = AttentionRegistry.create("vanilla", made)
        found = impl(*given, causal=True, bias=bias, softmax_aux=sinks, BTHD=layout)
        out = found.attention_outputs if layout else found.attention_outputs.swapaxes(1, 2)
        np.testing.assert_allclose(out, want, atol=3e-6, err_msg=str(named))
print("right")
"""


@pytest.mark.slow
def test_key_heads_go_where_they_are_read_whatever_axes_are_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEADS], capture_output=True, text=True, check=False, env=seeing(8)
    )
    assert done.stdout.strip() == "right", done.stderr[-3000:]


SPREAD = """
import jax, jax.numpy as jnp, numpy as np
from polyattn import Alibi, Causal, InvalidProblem, Padding, Window
from polyattn.jax import AttentionMetadata, AttentionRegistry, PartitionAxis, attention

draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
auto = jax.sharding.AxisType.Auto
B, T, N, K, H = 4, 16, 8, 4, 8
q, k, v, sinks = draw(0, B, T, N, H), draw(1, B, T, K, H), draw(2, B, T, K, H), draw(3, N)
lengths = Padding(kv_lengths=jnp.array([0, 5, 9, 16]))


def mesh_of(**axes):
    kinds = (auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def check(impl, q, metadata, spec=None, **options):
    # the result is the one device's, and nothing was gathered of what lies as metadata says
    mode = options["mode"]
    rules = metadata.get_shardings(mode)
    given = [
        jax.device_put(x, jax.sharding.NamedSharding(metadata.mesh, rule))
        for x, rule in zip((q, k, v), rules)
    ]
    run = jax.jit(lambda q, k, v: impl(q, k, v, softmax_aux=sinks, return_lse=True, **options))
    found = run(*given)
    told = impl.get_impl_name(), mode, options
    plain = {name: x for name, x in options.items() if name in ("mask", "bias")}
    if options.get("causal"):
        plain["mask"] = Causal() & plain["mask"] if "mask" in plain else Causal()
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True, backend="jax_reference", **plain)
    np.testing.assert_allclose(found.attention_outputs, out, atol=3e-6, err_msg=str(told))
    np.testing.assert_allclose(found.lse, lse, atol=3e-6, err_msg=str(told))
    if mode != "__insert__":  # whose rows are few, and wanted everywhere
        assert "all-gather(" not in run.lower(*given).compile().as_text(), told
    if spec is not None:
        there, wanted = found.attention_outputs.sharding, jax.sharding.NamedSharding
        assert there.is_equivalent_to(wanted(metadata.mesh, spec), 4), there


P = jax.sharding.PartitionSpec
whole = AttentionMetadata(mesh=mesh_of(dp=2, tp=2, sp=2))
named = AttentionMetadata(mesh=mesh_of(dp=2, ctx=4), partition_axis=PartitionAxis(
    batch_axis="dp", sequence_axis="ctx", head_axis=None, kv_head_axis=None))
two = AttentionMetadata(mesh=mesh_of(dp=2, ring=2, heads=2), sequence_axis_name=("ring", "heads"))
for name, metadata, spec in (
    ("ring", whole, P("dp", "sp", "tp")), ("ulysses", whole, P("dp", "sp", "tp")),
    ("ring", named, P("dp", "ctx")), ("ring", named.replace(scan_ring_attention=False), None),
    ("hybrid", two, P("dp", ("ring", "heads"))),
):
    impl = AttentionRegistry.create(name, metadata)
    check(impl, q, metadata, spec, mode="__train__", causal=True, mask=lengths)
ring = AttentionRegistry.create("ring", named)
second = ring(*(x.swapaxes(1, 2) for x in (q, k, v)), BTHD=False).attention_outputs
np.testing.assert_allclose(second.swapaxes(1, 2), ring(q, k, v).attention_outputs, atol=1e-6)
for options in (
    {}, {"causal": True, "mask": lengths}, {"causal": True, "mask": Window(left=5)},
    {"bias": Alibi(jnp.arange(N) / 8.0)},
):
    for rows, mode in ((1, "__autoregressive__"), (4, "__insert__")):
        decode = AttentionRegistry.create("decode", whole)
        check(decode, q[:, :rows], whole, mode=mode, **options)
check(AttentionRegistry.create("ring", whole), q[:, :1], whole, mode="__autoregressive__")

blockwise = AttentionRegistry.create("blockwise", whole)


def loss(q, k, v, sinks):
    found = blockwise(q, k, v, softmax_aux=sinks, mode="__insert__", mask=lengths)
    return (found.attention_outputs ** 2).sum()


def plain(q, k, v, sinks):
    out = attention(q, k, v, sinks=sinks, mask=lengths, backend="jax_reference")
    return (out ** 2).sum()


given = q[:, :3], k, v, sinks
for one, other in zip(*(jax.jit(jax.grad(f, (0, 1, 2, 3)))(*given) for f in (loss, plain))):
    np.testing.assert_allclose(one, other, atol=3e-5)
try:
    AttentionRegistry.create("hybrid", whole)(q, k, v)
except InvalidProblem as error:
    assert "expected two axes" in str(error), error
else:
    raise AssertionError
print("right")
"""


@pytest.mark.slow
def test_what_lies_as_the_metadata_says_is_gathered_by_nobody() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPREAD], capture_output=True, text=True, check=False, env=seeing(8)
    )
    assert done.stdout.strip() == "right", done.stderr[-3000:]


EXPLICIT = """
import jax, jax.numpy as jnp, numpy as np
from polyattn import Causal, DenseBias, Padding
from polyattn.jax import attention

draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
q, k, v = draw(0, 2, 8, 8, 8), draw(1, 2, 8, 2, 8), draw(2, 2, 8, 2, 8)
bias, sinks = draw(3, 2, 8, 8, 8), draw(4, 8)
mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
put = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))
P = jax.sharding.PartitionSpec
mask = Causal() & Padding(kv_lengths=jnp.array([3, 8]))


def value(backend):
    def loss(q, k, v, sinks, bias):
        out, lse = attention(q, k, v, mask=mask, sinks=sinks, bias=DenseBias(bias),
                             return_lse=True, backend=backend)
        return (out ** 2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum(), out
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4), has_aux=True))


(_, want), slopes = value("jax_reference")(q, k, v, sinks, bias)
given = put(q, "dp", None, "tp"), put(k, "dp"), put(v, None, None, None), put(sinks), put(bias)
for backend in BACKENDS:
    (_, out), found = value(backend)(*given)
    assert jax.typeof(out).sharding.spec == P("dp", None, "tp", None), jax.typeof(out)
    np.testing.assert_allclose(out, want, atol=3e-6, err_msg=backend)
    for one, other in zip(found, slopes):
        np.testing.assert_allclose(one, other, atol=3e-5, err_msg=backend)
eager = attention(*given[:3], mask=mask)
np.testing.assert_allclose(
    eager, attention(q, k, v, mask=mask, backend="jax_reference"), atol=3e-6
)
print("right")
"""


@pytest.mark.slow
def test_arrays_over_an_explicit_mesh_stay_where_they_are() -> None:
    backends = ["jax_blockwise", "jax_reference"]
    if isinstance(module.status(), Available):
        backends.append("native_cpu")
    done = subprocess.run(
        [sys.executable, "-c", EXPLICIT.replace("BACKENDS", repr(backends))],
        capture_output=True,
        text=True,
        check=False,
        env=seeing(8),
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
few = k[:, :, :2], v[:, :, :2]  # fewer key heads than devices
want = paged_attention(q, *few, table, lengths)
np.testing.assert_allclose(impl(q, *few, table, lengths).attention_outputs, want, atol=2e-6)
try:
    impl(q[:, :, :6], *few, table, lengths)
except InvalidProblem as error:
    assert "4 devices" in str(error), error
else:
    raise AssertionError
print("right")
"""


@pytest.mark.slow
def test_pages_lie_with_the_heads_that_read_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PAGED], capture_output=True, text=True, check=False, env=seeing(8)
    )
    assert done.stdout.strip() == "right", done.stderr[-3000:]


LISTS = """
import jax, jax.numpy as jnp, numpy as np
from polyattn import Causal, LeftPadding, Padding, Segments
from polyattn.jax import AttentionMetadata, AttentionRegistry, attention

draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
q, k, v = draw(0, 2, 8, 4, 8), draw(1, 2, 8, 2, 8), draw(2, 2, 8, 2, 8)
ids = [[0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 3]]
implicit = (jax.sharding.AxisType.Auto,) * 2
mesh = jax.make_mesh((2, 2), ("dp", "sp"), axis_types=implicit)
explicit = jax.make_mesh((2, 2), ("dp", "sp"))
rows = jax.sharding.NamedSharding(explicit, jax.sharding.PartitionSpec("dp"))
lying = [jax.device_put(x, rows) for x in (q, k, v)]
some = Padding([3, 8])
for mask in (some, LeftPadding([0, 2], [1, 3]), Segments(ids) & Causal(), ~some):
    want = attention(q, k, v, mask=mask, backend="jax_reference")
    names = ["vanilla", "flash_attn2"]
    if not isinstance(mask, (type(~Causal()), LeftPadding)):
        names.append("ring")
    for name in names:
        found = AttentionRegistry.create(name, AttentionMetadata(mesh=mesh))(q, k, v, mask=mask)
        np.testing.assert_allclose(found.attention_outputs, want, atol=3e-6)
    found = jax.jit(lambda *x: attention(*x, mask=mask))(*lying)
    np.testing.assert_allclose(found, want, atol=3e-6)
print("right")
"""


def test_lists_of_a_mask_are_spread_with_the_batch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTS], capture_output=True, text=True, check=False, env=seeing(4)
    )
    assert done.stdout.strip() == "right", done.stderr[-3000:]
