"""Plans, operators and pages whose arrays say themselves where they lie."""

import subprocess
import sys

import pytest

pytest.importorskip("jax")

from tests.jax.several_devices import seeing

OPERATORS_OVER_EXPLICIT = """
import jax, jax.numpy as jnp, numpy as np
from polyattn import InvalidProblem, Padding
from polyattn.jax import AttentionMetadata, AttentionRegistry, attention, paged_attention, plan

draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
q, k, v = draw(0, 2, 4, 4, 8), draw(1, 2, 4, 2, 8), draw(2, 2, 4, 2, 8)
table, lengths = jnp.array([[0], [1]]), jnp.array([4, 3])
mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp", None, "tp"))
given = [jax.device_put(x, where) for x in (q, k, v)]
want = attention(q, k, v, backend="jax_reference")
np.testing.assert_allclose(plan(*given, backend="jax_reference")(*given), want, atol=3e-6)
found = AttentionRegistry.create("vanilla", AttentionMetadata())(*given).attention_outputs
np.testing.assert_allclose(found, want, atol=3e-6)
want = paged_attention(q[:, :1], k, v, table, lengths)
row = jax.device_put(q[:, :1], where)
np.testing.assert_allclose(paged_attention(row, *given[1:], table, lengths), want, atol=3e-6)
for call in (attention, AttentionRegistry.create("flash", AttentionMetadata(mesh=mesh))):
    try:
        call(*given, mask=Padding(kv_lengths=[5, 4]))
    except InvalidProblem as error:
        assert "lengths from 4 to 5" in str(error), error
    else:
        raise AssertionError
print("right")
"""


@pytest.mark.slow
def test_plans_operators_and_pages_over_an_explicit_mesh() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPERATORS_OVER_EXPLICIT],
        capture_output=True, text=True, check=False, env=seeing(4),
    )  # fmt: skip
    assert done.stdout.strip() == "right", done.stderr[-3000:]
