"""Ring, zigzag and Ulysses over virtual devices: one result, whatever their number."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("jax")

from polyattn import InvalidProblem
from polyattn.jax.sequence_parallel.zigzag import zigzag_order
from tests.jax.several_devices import seeing

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from polyattn import Alibi, Causal, Dense, InvalidProblem, Padding, Segments, Window
from polyattn import record_selections
from polyattn.jax import AttentionMetadata, AttentionRegistry, attention
from polyattn.jax.sequence_parallel.ring import ring_attention
from polyattn.jax.sequence_parallel.ulysses import ulysses_attention
from polyattn.jax.sequence_parallel.zigzag import from_zigzag, to_zigzag

B, T, N, K, H = 2, 32, 8, 2, 8
draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
q, k, v, sinks = draw(0, B, T, N, H), draw(1, B, T, K, H), draw(2, B, T, K, H), draw(3, N, 2)
ids = jnp.arange(T) // 9
MASKS = {
    "none": lambda i: None,
    "causal": lambda i: Causal(),
    "window": lambda i: Causal() & Window(left=5),
    "both ways": lambda i: Window(left=3, right=9),
    "documents": lambda i: Segments(i, i) & Causal(),
    "padding": lambda i: Padding(jnp.array([32, 17]), jnp.array([5, 32])),
}

def mesh_of(devices):
    kinds = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("sp",), devices=jax.devices()[:devices], axis_types=kinds)

def spread(how, devices, mask, backend):
    def call(q, k, v, sinks):
        i = ids
        if how == "zigzag":
            q, k, v = (to_zigzag(x, devices) for x in (q, k, v))
            i = to_zigzag(ids, devices, 0)

        def local(q, k, v, sinks, i):
            options = dict(mask=mask(i), sinks=sinks, softcap=5.0, return_lse=True, backend=backend)
            if how == "ulysses":
                return ulysses_attention(q, k, v, **options)
            return ring_attention(
                q, k, v, balance="zigzag" if how == "zigzag" else "contiguous", **options
            )

        rows = P(None, "sp")
        out, lse = jax.shard_map(
            local, mesh=mesh_of(devices), in_specs=(rows, rows, rows, P(), P("sp")),
            out_specs=(rows, P(None, None, "sp")), check_vma=False,
        )(q, k, v, sinks, i)
        if how == "zigzag":
            out, lse = from_zigzag(out, devices), from_zigzag(lse, devices, 2)
        return out, lse

    return call

def learnt(call):
    def value(*given):
        out, lse = call(*given)
        return (out ** 2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    return jax.jit(jax.value_and_grad(value, (0, 1, 2, 3), has_aux=True))

for name in NAMES:
    mask = MASKS[name]
    whole = lambda q, k, v, s: attention(
        q, k, v, mask=mask(ids), sinks=s, softcap=5.0, return_lse=True, backend="jax_reference"
    )
    (_, (want, sums)), gradients = learnt(whole)(q, k, v, sinks)
    for how in ("ring", "zigzag", "ulysses"):
        for devices in (1, 2, 8) if name == "causal" else (2, 8):
            call = spread(how, devices, mask, "jax_blockwise" if devices == 2 else None)
            (_, (out, lse)), found = learnt(call)(q, k, v, sinks)
            np.testing.assert_allclose(out, want, atol=5e-6, err_msg=f"{name} {how} {devices}")
            np.testing.assert_allclose(lse, sums, atol=5e-6)
            for a, b in zip(found, gradients):
                np.testing.assert_allclose(a, b, atol=1e-4)

def refused(message, call):
    try:
        call()
    except InvalidProblem as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)

refused("bound to no mesh axis", lambda: ring_attention(q, k, v))
mesh = mesh_of(8)
for impl in ("ring", "ulysses"):
    made = AttentionRegistry.create(impl, AttentionMetadata(mesh=mesh))
    found = made(q, k, v, causal=True, softmax_aux=sinks, return_lse=True)
    want = attention(q, k, v, mask=Causal(), sinks=sinks, backend="jax_reference")
    np.testing.assert_allclose(found.attention_outputs, want, atol=5e-6)
    refused("expected Causal, Window, Segments",
            lambda: made(q, k, v, mask=jnp.ones((T, T), bool)))
    refused("8 devices", lambda: made(q[:, :30], k[:, :30], v[:, :30]))
    refused("got bias", lambda: made(q, k, v, bias=Alibi(jnp.ones(N))))
    refused("expected a mesh with the sequence axis",
            lambda: AttentionRegistry.create(impl, AttentionMetadata())(q, k, v))
refused("one of the other", lambda: AttentionRegistry.create("ulysses", AttentionMetadata(
    mesh=mesh_of(4)))(q[:, :, :6], k[:, :, :1], v[:, :, :1]))
half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
found = AttentionRegistry.create("ring", AttentionMetadata(mesh=mesh))(*half, causal=True)
want = attention(*half, mask=Causal(), backend="jax_reference")
assert found.attention_outputs.dtype == jnp.bfloat16
rows = [x.astype(jnp.float32) for x in (found.attention_outputs, want)]
np.testing.assert_allclose(*rows, atol=2e-2)
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("none", "causal", "window"), ("both ways", "documents", "padding")], ids=str
)
def test_one_result_whatever_the_number_of_devices(names: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("NAMES", repr(names))],
        capture_output=True,
        text=True,
        check=False,
        env=seeing(8),
    )
    assert done.stdout.strip() == "right", done.stderr[-3000:]


def test_the_zigzag_order_is_one() -> None:
    for devices in (1, 2, 4):
        order = zigzag_order(16, devices)
        assert sorted(order.tolist()) == list(range(16))
        mine = np.split(order, devices)
        work = [sum(row + 1 for row in rows) for rows in mine]
        assert len(set(work)) == 1  # of a causal mask, the same for each
    with pytest.raises(InvalidProblem, match="a multiple of 8"):
        zigzag_order(12, 4)
