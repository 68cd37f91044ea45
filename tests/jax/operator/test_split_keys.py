"""A cache that is spread along the sequence: parts are joined as the whole would be."""

import subprocess
import sys

import pytest

pytest.importorskip("jax")

from tests.jax.several_devices import seeing

SPLIT = """
import jax, jax.numpy as jnp, numpy as np
from polyattn import Alibi, Padding
from polyattn.jax import AttentionMetadata, AttentionRegistry, attention

draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
q, k, v = draw(0, 2, 1, 4, 8), draw(1, 2, 1024, 2, 8), draw(2, 2, 1024, 2, 8)
mesh = jax.make_mesh((2,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
decode = AttentionRegistry.create("decode", AttentionMetadata(mesh=mesh))
slopes = jnp.array([0.013, 0.02, 0.007, 0.003], jnp.bfloat16)
for told in (
    {"sinks": jnp.full(4, 200.0), "mask": Padding(kv_lengths=[1000, 0])},
    {"bias": Alibi(slopes)},
):
    out, lse = attention(q, k, v, return_lse=True, **told)
    names = {"sinks": "softmax_aux"}
    found = decode(q, k, v, return_lse=True, **{names.get(n, n): x for n, x in told.items()})
    np.testing.assert_allclose(found.attention_outputs, out, atol=2e-6)
    np.testing.assert_allclose(found.lse, lse, atol=3e-6)
print("right")
"""


@pytest.mark.slow
def test_parts_of_a_cache_are_joined_under_great_sinks_and_slopes_of_half_types() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPLIT], capture_output=True, text=True, check=False, env=seeing(2)
    )
    assert done.stdout.strip() == "right", done.stderr[-3000:]
