"""The first call of a process, which finds backends, settings and measured times."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("jax")

PROGRAM = """
import jax, jax.numpy as jnp
from polyattn import Unsupported, settings
from polyattn.jax import attention, explain

traced = []

@jax.jit
def run(q):
    traced.append(None)
    EXPLAIN
    return attention(q, q, q)

for _ in range(3):
    run(jnp.ones((1, 8, 2, 16)))
assert len(traced) == 1, len(traced)
settings.reload()  # what was chosen may be another now
for _ in range(2):
    run(jnp.ones((1, 8, 2, 16)))
assert len(traced) == 2, len(traced)

refused = []

@jax.jit
def another_way(q):
    try:
        return attention(q, q, q, backend="jax_cudnn")
    except Unsupported:
        refused.append(None)
        return q

settings.reload()
for _ in range(2):
    another_way(jnp.ones((1, 8, 2, 16)))
    settings.reload()  # what was refused may be here now
assert len(refused) == 2, len(refused)
print("right")
"""


@pytest.mark.parametrize("first", ["pass", "explain(q, q, q)"])
def test_a_program_is_traced_once_and_again_when_a_choice_may_have_changed(first: str) -> None:
    environment = os.environ | {"POLYATTN_CALIBRATION": "on"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("EXPLAIN", first)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.stdout.strip() == "right", done.stderr[-3000:]
