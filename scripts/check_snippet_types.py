"""Check README.md's Python as a user's strict type checker does, against the installed package.

All of its blocks are one program, as they are for the test that runs them.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def main() -> int:
    """Return mypy's exit code; what it finds is printed."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "readme.py"
        program.write_text("\n".join(BLOCK.findall(text)), encoding="utf-8")
        command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(program)]
        return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
