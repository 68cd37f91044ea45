"""Within `jax.shard_map` as it is by default: it checks over which devices values vary."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("jax")

from polyattn.selection.registry import Missing, registry
from tests.jax.several_devices import seeing

BEGIN = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from polyattn import Alibi, BlockMap, Causal, Dense, DenseBias, Padding, Segments
from polyattn.jax import attention, paged_attention, spread_sequence
from polyattn.jax.sequence_parallel.ring import ring_attention
from polyattn.jax.sequence_parallel.ulysses import ulysses_attention

def mesh_of(*named):
    names, sizes = zip(*named)
    return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))

def near(mine, other):
    for one, two in zip(mine, other, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=2e-5)

draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
"""
LOCAL = """
B, T, S, N, K, H = 4, 5, 6, 4, 2, 8
q, k, v = draw(0, B, T, N, H), draw(1, B, S, K, H), draw(2, B, S, K, H)
bias, sinks, lengths = draw(3, 1, N, T, S), jnp.linspace(-1, 1, N), jnp.array([3, 4, 5, 6])
seen = np.tril(np.ones((1, 1, T, S), bool))
KINDS = {
    "padding": lambda bias, sinks, lengths: {"mask": Padding(None, lengths) & Causal()},
    "bias": lambda bias, sinks, lengths: {"bias": DenseBias(bias)},
    "slopes": lambda bias, sinks, lengths: {"bias": Alibi(jnp.array([.5, .25, .1, .1]))},
    "sinks": lambda bias, sinks, lengths: {"sinks": sinks, "softcap": 5.0},
    "dense": lambda bias, sinks, lengths: {"mask": Dense(jnp.asarray(seen))},
    "blocks": lambda bias, sinks, lengths: {"mask": BlockMap(
        4, 4, jnp.zeros((1, 1, 2, 1), jnp.int32), jnp.ones((1, 1, 2), jnp.int32)
    )},
    "lse": lambda bias, sinks, lengths: {"return_lse": True},
}

def loss(kind, backend, q, k, v, bias, sinks, lengths):
    got = attention(q, k, v, backend=backend, **KINDS[kind](bias, sinks, lengths))
    return sum(jnp.tanh(x).sum() for x in (got if kind == "lse" else (got,)))

backend = sys.argv[1] if sys.argv[1] != "chosen" else None
few = {"chosen": ("bias", "lse"), "jax_xla": ("bias", "padding")}
kinds = few.get(sys.argv[1], tuple(KINDS))
mesh, given = mesh_of(("dp", 4)), (q, k, v, bias, sinks, lengths)
places = (P("dp"),) * 3 + (P(), P()) + (P("dp"),)
for kind in kinds:
    def part(*given):
        return jax.lax.psum(loss(kind, backend, *given), "dp")
    whole = jax.shard_map(part, mesh=mesh, in_specs=places, out_specs=P())
    wanted = jax.grad(lambda *given: loss(kind, "jax_reference", *given), (0, 1, 2, 3, 4))(*given)
    near([jax.jit(whole)(*given)], [loss(kind, "jax_reference", *given)])
    near(jax.jit(jax.grad(whole, (0, 1, 2, 3, 4)))(*given), wanted)
within = jax.shard_map(
    jax.grad(lambda *given: loss("bias", backend, *given), (0, 1, 2, 3)),
    mesh=mesh, in_specs=places, out_specs=places[:4],
)  # gradients of what is replicated are summed
wanted = jax.grad(lambda *given: loss("bias", "jax_reference", *given), (0, 1, 2, 3))(*given)
near(jax.jit(within)(*given), wanted)
mapped = jax.shard_map(
    jax.vmap(lambda q, k: attention(q, k, k, backend=backend)),
    mesh=mesh, in_specs=(P(None, "dp"), P(None, "dp")), out_specs=P(None, "dp"),
)
two = jnp.stack([q, -q]), jnp.stack([k, k])
near(jax.jit(mapped)(*two), [attention(q, k, k, backend="jax_reference") for q, k in zip(*two)])
"""
SPREAD = """
B, T, N, H = 2, 16, 4, 8
q, k = draw(0, B, T, N, H), draw(1, B, T, N, H)
sinks, ids = jnp.linspace(-1, 1, N), jnp.arange(T) // 6

def along(*axes):
    def call(q, k, sinks, ids):
        with spread_sequence(axes if len(axes) > 1 else axes[0]):
            return attention(q, k, k, mask=Causal(), sinks=sinks)
    return call

def ring(q, k, sinks, ids):
    mask = Segments(ids, ids) & Causal()
    return ring_attention(q, k, k, axis_name="sp", mask=mask, sinks=sinks, backend=backend)

def ulysses(q, k, sinks, ids):
    return ulysses_attention(q, k, k, axis_name="sp", mask=Causal(), sinks=sinks, backend=backend)

backend = None
mesh = mesh_of(("dp", 2), ("sp", 2))
for name, call, rows in (
    ("ring", ring, P("dp", "sp")), ("ulysses", ulysses, P("dp", "sp")),
    ("along one", along("sp"), P("dp", "sp")),
    ("along two", along("dp", "sp"), P(None, ("dp", "sp"))),
):
    def wanted(q, k, sinks):
        mask = Segments(ids, ids) & Causal() if name == "ring" else Causal()
        return jnp.tanh(attention(q, k, k, mask=mask, sinks=sinks, backend="jax_reference")).sum()
    def part(q, k, sinks, ids):
        return jax.lax.psum(jnp.tanh(call(q, k, sinks, ids)).sum(), ("dp", "sp"))
    of_ids = P(rows[1])
    whole = jax.shard_map(part, mesh=mesh, in_specs=(rows, rows, P(), of_ids), out_specs=P())
    found = jax.jit(jax.grad(whole, (0, 1, 2)))(q, k, sinks, ids)
    near(found, jax.grad(wanted, (0, 1, 2))(q, k, sinks))
"""
PAGED = """
pages = draw(2, 6, 4, 2, 8)
table, lengths = jnp.array([[0, 1], [2, 3], [4, 5], [1, 2]]), jnp.array([5, 8, 3, 7])
q = draw(0, 4, 1, 4, 8)
call = jax.shard_map(
    lambda q, table, lengths: paged_attention(q, pages, pages, table, lengths),
    mesh=mesh_of(("dp", 4)), in_specs=P("dp"), out_specs=P("dp"),
)
near([jax.jit(call)(q, table, lengths)], [paged_attention(q, pages, pages, table, lengths)])
"""


def run(program: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program, *arguments],
        env=seeing(4),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["chosen", "jax_xla", "jax_blockwise", "native_cpu"])
def test_calls_and_gradients(backend: str) -> None:
    if backend != "chosen" and isinstance(registry["jax", backend].probe(), Missing):
        pytest.skip(f"{backend} does not run here")
    run(LOCAL, backend)


@pytest.mark.slow
def test_sequences_spread_over_devices() -> None:
    run(SPREAD)


def test_keys_in_pages() -> None:
    run(PAGED)
