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
from polyattn.trace.recorders.jax import tap, trace
from polyattn.trace import read
from polyattn.trace.statistics import statistics
from polyattn.trace.statistics.sketch import decode

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


def refused(run, said, **options):
    try:
        with trace(sys.argv[1] + "2", overwrite=True, **options):
            run()
    except TraceError as error:
        assert said in str(error), error
    else:
        raise AssertionError("no refusal")


def add(x):
    return tap(x + 1, "m")


for options in ({}, {"ordered": False}):
    for part in (add, jax.jit(add), jax.vmap(add), lambda x: jax.lax.map(add, x),
                 jax.checkpoint(add)):
        mapped = jax.shard_map(part, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        parts = value.reshape(4, 2, 100)
        for inside in (lambda: mapped(x), lambda: jax.jit(mapped)(x)):
            refused(inside, "inside shard_map or pmap over the axes ('i',), where", **options)
        refused(lambda: jax.pmap(part)(parts), "inside shard_map or pmap, where", **options)
    refused(lambda: jax.pmap(lambda x: tap(jax.lax.psum(x, "j"), "m"), axis_name="j")(value[:4]),
            "over the axes ('j',)", **options)
    with trace(sys.argv[1] + "3", overwrite=True, **options):  # what goes in and comes out
        tap(jax.pmap(lambda x: x + 1)(tap(value[:4], "in")), "out")
    found = read(sys.argv[1] + "3").records
    assert [r.module for r in found] == ["in", "out"], found
    assert abs(found[1].mean - found[0].mean - 1) < 1e-6
before = jax.pmap(add)
before(value[:4])
refused(lambda: before(value[:4]), "one device's part")  # compiled, and not run without its tap
before(value[:4])
refused(lambda: model(x), "trace(..., ordered=False)")
"""


def test_sharded_arrays_are_recorded_whole_and_parts_refused(tmp_path: Path) -> None:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "a")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
