"""``spread_sequence``: ring, Ulysses and hybrid are chosen and asked for as backends."""

from __future__ import annotations

import subprocess
import sys

import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from polyattn import InvalidProblem, Problem, UnknownBackend, Unsupported
from polyattn.jax import attention, explain, spread_sequence
from polyattn.jax.kit.spread_sequence import SpreadSequence
from tests.jax.several_devices import seeing

SETUP = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from polyattn import Causal, Padding, Segments, Unsupported, Window
from polyattn import record_selections, use_backend
from polyattn.jax import AttentionMetadata, AttentionRegistry, attention, spread_sequence
from polyattn.jax.sequence_parallel.zigzag import from_zigzag, to_zigzag

B, T, N, K, H = 2, 32, 8, 4, 8
draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
q, k, v, sinks = draw(0, B, T, N, H), draw(1, B, T, K, H), draw(2, B, T, K, H), draw(3, N, 2)

def mesh_of(**axes):
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    count = int(np.prod([*axes.values()]))
    names = tuple(axes)
    return jax.make_mesh((*axes.values(),), names, devices=jax.devices()[:count], axis_types=kinds)

def spread(mesh, mask=lambda i: Causal(), balance="contiguous", layout="BTNH", **options):
    axes = mesh.axis_names
    parts = mesh.shape[axes[0]]
    ids = jnp.arange(T) // 9

    def call(q, k, v, sinks):
        given = [to_zigzag(x, parts) if balance == "zigzag" else x for x in (q, k, v)]
        i = to_zigzag(ids, parts, 0) if balance == "zigzag" else ids

        def local(q, k, v, sinks, i):
            if layout == "BNTH":
                q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
            with spread_sequence(axes[0] if len(axes) == 1 else axes, balance=balance):
                out, lse = attention(q, k, v, mask=mask(i), sinks=sinks, softcap=5.0,
                                     return_lse=True, layout=layout, **options)
            return (out.swapaxes(1, 2) if layout == "BNTH" else out), lse

        rows = P(None, axes)
        out, lse = jax.shard_map(
            local, mesh=mesh, in_specs=(rows, rows, rows, P(), P(axes)),
            out_specs=(rows, P(None, None, axes)), check_vma=False,
        )(*given, sinks, i)
        if balance == "zigzag":
            out, lse = from_zigzag(out, parts), from_zigzag(lse, parts, 2)
        return out, lse

    return call

def learnt(call):
    def value(*given):
        out, lse = call(*given)
        return (out ** 2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    return jax.jit(jax.value_and_grad(value, (0, 1, 2, 3), has_aux=True))

def whole(mask):
    ids = jnp.arange(T) // 9
    return learnt(lambda q, k, v, s: attention(
        q, k, v, mask=mask(ids), sinks=s, softcap=5.0, return_lse=True, backend="jax_reference"
    ))(q, k, v, sinks)

def check(found, wanted):
    (_, (out, lse)), gradients = found
    (_, (want, sums)), right = wanted
    np.testing.assert_allclose(out, want, atol=5e-6)
    np.testing.assert_allclose(lse, sums, atol=5e-6)
    for a, b in zip(gradients, right):
        np.testing.assert_allclose(a, b, atol=1e-4)
"""

HYBRID = """
MASKS = (
    lambda i: None, lambda i: Causal(), lambda i: Segments(i, i) & Causal() & Window(left=20),
    lambda i: Padding(jnp.array([32, 17]), jnp.array([5, 32])),
)
for mask in MASKS:
    wanted = whole(mask)
    for sizes in ((2, 4), (4, 2)):
        mesh = mesh_of(ring=sizes[0], heads=sizes[1])
        for balance in ("contiguous", "zigzag"):
            check(learnt(spread(mesh, mask, balance))(q, k, v, sinks), wanted)
print("right")
"""

CHOSEN = """
wanted = whole(lambda i: Causal())
ring, square = mesh_of(sp=4), mesh_of(ring=2, heads=2)

def ran(call):
    with record_selections() as ran:
        check(learnt(call)(q, k, v, sinks), wanted)
    return {one.backend for one in ran}

assert "jax_ulysses" in ran(spread(ring))
assert "jax_ring" in ran(spread(ring, balance="zigzag"))  # Ulysses has no such order
assert "jax_ring" in ran(spread(ring, backend="jax_ring", layout="BNTH"))
assert "jax_hybrid" in ran(spread(square))
with use_backend(["jax_ring", "jax_blockwise"]):  # the second for what each device computes
    assert ran(spread(ring)) == {"jax_ring", "jax_blockwise"}
for name, message in (("jax_blockwise", "spread over sp=4"), ("jax_hybrid", "two mesh axes")):
    try:
        spread(ring, backend=name)(q, k, v, sinks)
    except Unsupported as error:
        assert message in str(error), error
    else:
        raise AssertionError(name)

# traced once for whole sequences and once for spread ones: each its own program
@jax.jit
def layer(x):
    return attention(x, x, x, mask=Causal())

def both(x):
    with spread_sequence("sp"):
        along = layer(x)
    return along, layer(x)

rows = P(None, "sp")
along, alone = jax.shard_map(both, mesh=ring, in_specs=rows, out_specs=rows, check_vma=False)(q)
np.testing.assert_allclose(along, layer(q), atol=5e-6)
parts = [layer(part) for part in jnp.split(q, 4, 1)]
np.testing.assert_allclose(alone, jnp.concatenate(parts, 1), atol=5e-6)

made = AttentionRegistry.create(
    "hybrid", AttentionMetadata(mesh=square, sequence_axis_name=("ring", "heads"))
)
found = made(q, k, v, causal=True, return_lse=True)
want, lse = attention(q, k, v, mask=Causal(), return_lse=True, backend="jax_reference")
np.testing.assert_allclose(found.attention_outputs, want, atol=5e-6)
np.testing.assert_allclose(found.lse, lse, atol=5e-6)
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [HYBRID, CHOSEN], ids=["hybrid", "chosen"])
def test_over_eight_devices(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETUP + program],
        capture_output=True,
        text=True,
        check=False,
        env=seeing(8),
    )
    assert done.stdout.strip() == "right", done.stderr[-3000:]


def test_without_a_mesh_it_is_an_error_and_ends_with_its_block() -> None:
    x = jnp.ones((1, 8, 2, 4))
    with pytest.raises(InvalidProblem, match="bound to no mesh axis"), spread_sequence("sp"):
        attention(x, x, x)
    assert attention(x, x, x).shape == x.shape
    with pytest.raises(Unsupported, match="a whole sequence"):
        attention(x, x, x, backend="jax_ring")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"axis_name": ("a", "b", "c")}, InvalidProblem, "two"),
        ({"axis_name": ("a", "a")}, InvalidProblem, "axis_name"),
        ({"axis_name": "a b"}, InvalidProblem, "axis_name"),
        ({"axis_name": 3}, InvalidProblem, "axis_name"),
        ({"balance": "striped"}, InvalidProblem, "zigzag"),
        ({"local": "jax_blckwise"}, UnknownBackend, "jax_blockwise"),
    ],
)
def test_wrong_names_are_refused(arguments: dict[str, object], error: type, message: str) -> None:
    with pytest.raises(error, match=message), spread_sequence(**arguments):
        pass


def test_it_is_a_fact_of_a_problem() -> None:
    spread = SpreadSequence((("ring", 2), ("heads", 4)), "zigzag", ("native_cpu",))
    assert SpreadSequence.parse(str(spread)) == spread and spread.devices == 8
    problem = Problem(
        batch=1, q_len=8, kv_len=8, heads=8, kv_heads=8, head_dim=8, framework="jax",
        spread=str(spread),
    )  # fmt: skip
    assert Problem.from_json(problem.to_json()) == problem
    assert explain(problem).backend == "jax_hybrid"
    assert "sequence" in str(explain(problem).decisions["native_cpu"])
    with pytest.raises(Unsupported, match="multiples of 4"):
        explain(problem.with_(heads=6, kv_heads=6))
