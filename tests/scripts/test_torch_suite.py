"""scripts/torch_suite.py finds the tests that end otherwise through polyattn, crashes too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "torch_suite.py"
TESTS = """
import os

import torch
import torch.nn.functional as F

stock = F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_alike():
    q = torch.ones(1, 1, 4, 8)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), q)


def test_fails_in_both():
    assert not torch


def test_needs_stock():
    assert stock


def test_needs_polyattn():
    assert not stock


def test_aborts():
    if not stock:
        os.abort()


def test_after_the_abort():
    pass
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_each_difference_is_found_and_crashes_do_not_end_the_run(tmp_path: Path) -> None:
    suite, report = tmp_path / "test_some.py", tmp_path / "report.json"
    suite.write_text(TESTS)
    ended = run(suite, "--ways", "dropin", "--json", report)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    found = json.loads(report.read_text())
    verdicts = {
        row["test"].rpartition("::")[2]: row["verdict"] for row in found["differences"]["dropin"]
    }
    assert verdicts == {
        "test_needs_stock": "fails only ours",
        "test_needs_polyattn": "fails only stock",
        "test_aborts": "fails only ours",
    }
    counts = found["counts"][str(suite)]
    assert counts["stock"] == {"passed": 4, "failed": 2}
    assert counts["dropin"] == {"passed": 3, "failed": 2, "crashed": 1}
    assert run(suite, "--ways", "dropin", "--match", "alike").returncode == 0


def test_what_is_no_suite_is_an_error(tmp_path: Path) -> None:
    assert "expected a PyTorch checkout" in run(tmp_path / "none").stderr
    assert "expected some of dropin" in run(tmp_path, "--ways", "dorpin").stderr
    assert run(tmp_path).returncode == 2  # a folder without any of torch's tests: nothing ran
