"""The table of backends in README.md says what the backends declare."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent


def test_readme_shows_what_the_backends_declare() -> None:
    script = ROOT / "scripts" / "backend_table.py"
    made = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("<!-- backends: made by scripts/backend_table.py --write -->\n")
    shown, end, _ = rest.partition("\n<!-- end of backends -->")
    assert end, "README.md lacks the marks around its table of backends"
    assert shown == made.stdout.strip(), "run: python scripts/backend_table.py --write"
