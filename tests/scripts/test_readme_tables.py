"""The tables of README.md say what the backends declare and what the record holds."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


def test_the_tables_are_up_to_date() -> None:
    script = ROOT / "scripts" / "readme_tables.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
