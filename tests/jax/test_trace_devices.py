"""Several devices: one process that pretends to have four of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")
if not hasattr(jax, "make_user_context"):
    pytest.skip("this JAX has no make_user_context", allow_module_level=True)

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from polyattn.errors import TraceError
from polyattn.jax.trace import tap, trace
from polyattn.trace import read
from polyattn.trace.statistics import statistics
from polyattn.trace.sketch import decode

mesh = jax.make_mesh((4,), ("i",))
value = np.random.default_rng(0).standard_normal((8, 100)).astype(np.float32)
x = jax.device_put(value, NamedSharding(mesh, P("i")))
model = jax.jit(lambda x: tap(tap(x, "a") * 2, "b"))
with trace(sys.argv[1], ordered=False):
    model(x), model(x)
found = read(sys.argv[1]).records
assert [(r.module, r.call) for r in found] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)], found
expected = statistics(value)
assert abs(found[0].l2 - expected["l2"]) < 1e-6 * expected["l2"]
assert np.allclose(found[0].buckets(), decode(expected["sketch"]), atol=1e-5)
part = jax.jit(jax.shard_map(lambda x: tap(x, "m"), mesh=mesh, in_specs=P("i"), out_specs=P("i")))
try:
    with trace(sys.argv[1] + "2", ordered=False):
        part(x)
except TraceError as error:
    assert "one device's part" in str(error), error
else:
    raise AssertionError("no refusal")
"""


def test_sharded_arrays_are_recorded_whole_and_parts_refused(tmp_path: Path) -> None:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "a")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
