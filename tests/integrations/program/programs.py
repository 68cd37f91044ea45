"""Programs run as a user would run them, in processes of their own, and what is said of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parents[3] / "src"
START_UP = SRC / "polyattn/integrations/program/start_up"
GIVE_UP_S = 600
"""Only so that a test ends at last if something hangs."""


def environment(**changes):
    return {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **changes}


def polyattn(*args, **options):
    """Run `polyattn ARGS` to its end; what it printed is text."""
    env = environment(**options.pop("env", {}))
    return subprocess.run(
        [sys.executable, "-m", "polyattn", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        env=env,
        **options,
    )


def reported(folder, text, *args, options=(), env=None, code=0):
    """Run a program under `polyattn run`; return what its report holds."""
    path = folder / "program.py"
    path.write_text(text)
    said = folder / "said.json"
    done = polyattn(
        "run", f"--json={said}", *options, path, *args,
        env={"TMPDIR": str(folder), **(env or {})}, cwd=folder,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert not list(folder.glob("polyattn-run-*")), "the run's folder is left behind"
    found = json.loads(said.read_text())
    assert found["exit_code"] == code
    return found


def calls(report):
    """Return the calls of each process by its name; several of one name are added up."""
    found = {}
    for one in report["processes"]:
        total = sum(one["calls"].values())
        if total:
            found[one["name"]] = found.get(one["name"], 0) + total
    return found


def ran(report):
    """Return what calls ran on, and by whose wish."""
    every = [ran for one in report["classes"] for ran in one["ran"]]
    return {(one["backend"], one["source"]) for one in every}
