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
from pathlib import Path
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


def loop(x):
    x = tap(x * 2, "m", "in")
    return jax.lax.scan(lambda c, _: (tap(c + 1, "loop"), None), x, None, length=2)[0]


def ranks(run, **options):
    with trace(sys.argv[1] + "4.jsonl", overwrite=True, **options) as run_of, run_of.step(3):
        run()
    assert not Path(sys.argv[1] + "4.jsonl").exists()  # nothing was seen of whole arrays
    found = [read(f"{sys.argv[1]}4.rank{i}.jsonl") for i in range(4)]
    assert [(one.header.rank, one.header.world) for one in found] == [(i, 4) for i in range(4)]
    return [one.records for one in found]


cube = value.reshape(8, 10, 10)
auto = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
for options in ({}, {"ordered": False}):
    for part in (loop, jax.jit(loop), jax.vmap(loop), jax.checkpoint(loop)):
        for check in (True, False):
            mapped = jax.shard_map(
                part, mesh=auto, in_specs=P("i"), out_specs=P("i"), check_vma=check
            )
            for rank, found in enumerate(ranks(lambda: jax.jit(mapped)(cube), **options)):
                said = [(r.module, r.call, r.step) for r in found]
                assert said == [("m", 0, 3), ("loop", 0, 3), ("loop", 1, 3)], said
                mine = cube[2 * rank : 2 * rank + 2]
                assert abs(found[0].mean - 2 * mine.mean()) < 1e-5


def loss(x, w):
    part = lambda x, w: tap(tap(x, "a", "in") * w, "a").sum().reshape(1)
    return jax.shard_map(part, mesh=auto, in_specs=(P("i"), P()), out_specs=P("i"))(x, w).sum()


for found in ranks(lambda: jax.jit(jax.grad(loss, (0, 1)))(value, jnp.full((1, 100), 3.0)),
                   gradients=True):
    said = {(r.module, r.phase): r.mean for r in found}
    assert said["a", "grad_out"] == 1 and said["a", "grad_in"] == 3, said
square = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
both = jax.shard_map(add, mesh=square, in_specs=P(("a", "b")), out_specs=P(("a", "b")))
for rank, found in enumerate(ranks(lambda: jax.jit(both)(value))):
    assert abs(found[0].mean - 1 - value[2 * rank : 2 * rank + 2].mean()) < 1e-5
some = jax.shard_map(
    add, mesh=square, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}, check_vma=False
)
refused(lambda: jax.jit(some)(value), "('b',)")
with trace(sys.argv[1] + "5.jsonl") as run:  # whole arrays and parts, each in its file
    tap(jnp.ones(3), "whole")
    jax.jit(both)(value)
assert [r.module for r in read(sys.argv[1] + "5.jsonl").records] == ["whole"]
assert [r.module for r in read(sys.argv[1] + "5.rank3.jsonl").records] == ["m"]
for options in ({}, {"ordered": False}):
    parts = value.reshape(4, 2, 100)
    refused(lambda: jax.pmap(add)(parts), "inside pmap", **options)
    with trace(sys.argv[1] + "3", overwrite=True, **options):  # what goes in and comes out
        tap(jax.pmap(lambda x: x + 1)(tap(value[:4], "in")), "out")
    found = read(sys.argv[1] + "3").records
    assert [r.module for r in found] == ["in", "out"], found
    assert abs(found[1].mean - found[0].mean - 1) < 1e-6
before = jax.pmap(add)
before(value[:4])
refused(lambda: before(value[:4]), "device's part")  # compiled, and not run without its tap
before(value[:4])
refused(lambda: model(x), "trace(..., ordered=False)")
"""


def test_sharded_arrays_are_recorded_whole_and_parts_by_rank(tmp_path: Path) -> None:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "a")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
