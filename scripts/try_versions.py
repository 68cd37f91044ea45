"""Prove the declared range: the core of the tests with other versions of Python, torch and JAX.

What is tested is the wheel, built for each Python. An environment is made in a temporary folder and
deleted after its tests, also on Ctrl-C; only one exists at a time. pip keeps what it downloaded.
With ``--keep FOLDER`` environments and wheels stay there, and serve again (wheels until a source
is newer).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The selector, the semantics of every CPU backend, compilation, the drop-in, flags, hooks: what
# rests on torch. About five minutes on two cores.
CORE = (
    "tests/selection/test_select.py",
    "tests/integrations/fastvideo/test_selector.py",
    "tests/masks/test_masks.py",
    "tests/test_import_is_inert.py",
    "tests/conformance/test_conformance.py",
    "tests/torch/test_internals.py",
    "tests/torch/test_compile.py",
    "tests/torch/test_sizes_that_change.py",
    "tests/torch/test_admission.py",
    "tests/torch/test_dropin.py",
    "tests/torch/test_paged.py",
    "tests/torch/test_checkpoints.py",
    "tests/torch/test_scopes.py",
    "tests/backends/native_cpu/test_operator.py",
    "tests/torch/flags/test_float32.py",
    "tests/torch/flags/test_can_use.py",
    "tests/torch/flags/test_table.py",
    "tests/hooks/test_hooks_calls.py",
    "tests/hooks/test_hooks_compile.py",
    "tests/trace/recorders/torch/test_compile.py",
    "tests/trace/recorders/torch/test_in_place.py",
    "tests/integrations/test_sdpa_patch.py",
)  # fmt: skip
# The same of what rests on JAX. About six minutes.
CORE_OF_JAX = (
    "tests/jax/test_attention.py",
    "tests/jax/test_paged.py",
    "tests/jax/test_checked_shard_map.py",
    "tests/jax/flags",
    "tests/jax/operator",
    "tests/jax/sequence_parallel",
    "tests/jax/backends",
)
TOOLS = ("numpy", "pytest", "pytest-xdist", "hypothesis", "ml_dtypes", "rich", "setuptools")


@dataclass
class Corner:
    """One pair of versions, and what came out. `jax`: its version, where that is tried."""

    python: str
    torch: str
    jax: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    trouble: str = ""
    failed: list[str] = field(default_factory=list)

    @property
    def tried(self) -> str:
        """What is tried with the Python, as pip names it."""
        return f"jax=={self.jax}" if self.jax else f"torch=={self.torch}"

    @property
    def passes(self) -> bool:
        """Whether every test that ran here passed, and some did."""
        c = self.counts
        return not self.trouble and c.get("passed", 0) > 0 and not c["failed"] and not c["errors"]


def declared(pyproject: str) -> tuple[list[str], str]:
    """Return the Python versions and the oldest torch that a pyproject.toml declares."""
    project = tomllib.loads(pyproject)["project"]
    low, high = re.findall(r"3\.(\d+)", project["requires-python"])
    pythons = [f"3.{minor}" for minor in range(int(low), int(high))]
    return pythons, oldest_of(pyproject, "torch")


def oldest_of(pyproject: str, library: str) -> str:
    """Return the oldest version of torch or jax that a pyproject.toml declares."""
    given = tomllib.loads(pyproject)["project"]["optional-dependencies"][library]
    start = f"{library}>="
    oldest = next(each for each in given if each.startswith(start)).removeprefix(start)
    return oldest if oldest.count(".") == 2 else f"{oldest}.0"


def corners(pyproject: str, pinned: str, newest: str) -> list[Corner]:
    """Return the corners of the range: both ends of torch, every Python, and the oldest JAX.

    The Pythons between the first and the last are tried with the torch that we develop with.
    """
    pythons, oldest = declared(pyproject)
    between = [Corner(python, pinned) for python in pythons[1:-1]]
    ends = [Corner(pythons[0], oldest), Corner(pythons[0], newest)]
    jax = Corner(pythons[0], "", oldest_of(pyproject, "jax"))
    return [*ends, *between, Corner(pythons[-1], newest), jax]


def interpreter(version: str) -> str:
    """Return the path of a Python of a version such as 3.12, from the PATH or from pyenv."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    pyenv = sorted(home.glob(f"versions/{version}.*/bin/python"))
    for candidate in (shutil.which(f"python{version}"), *map(str, reversed(pyenv))):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    raise SystemExit(
        f"got no Python {version} on the PATH or in {home}; install it, or leave it out"
    )


def newest_torch() -> str:
    """Ask the package index for the newest torch."""
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode:
        pip = [interpreter("{}.{}".format(*sys.version_info)), "-m", "pip"]
    command = [*pip, "index", "versions", "torch"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"Available versions: ([\d.]+)", said)
    if found is None:
        raise SystemExit(f"got no versions of torch from {' '.join(command)!r}: {said[:200]}")
    return found[1]


_FREE = r"(torch|triton|jax|jaxlib)=="


def constraints(folder: Path) -> Path:
    """Write our constraints without those on torch and JAX and what they bring."""
    path = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not re.match(_FREE, line)))
    return path


def run(*command: str | Path, **more: object) -> None:
    """Run a command, quietly; its output is shown if it fails."""
    done = subprocess.run(  # type: ignore[call-overload]
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command[:5]))} failed:\n{done.stdout[-3000:]}")


def wheel(python: Path, corner: Corner, home: Path) -> Path:
    """Build polyattn's wheel for a Python, unless there is one as new as the sources."""
    place = home / f"wheel-{corner.python}"
    made = max((path.stat().st_mtime for path in place.glob("polyattn-*.whl")), default=0.0)
    parts = [ROOT / "pyproject.toml", ROOT / "CMakeLists.txt"]
    for part in ("src/polyattn", "native"):
        parts += [path for path in (ROOT / part).rglob("*.*") if path.suffix not in (".pyc", ".so")]
    if made < max(path.stat().st_mtime for path in parts):
        shutil.rmtree(place, ignore_errors=True)
        run(python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", place, ROOT)
    return next(place.glob("polyattn-*.whl"))


def install(corner: Corner, folder: Path, environment: Path) -> Path:
    """Make the environment, unless it is there and complete; returns its interpreter."""
    python, complete = environment / "bin" / "python", environment / "complete"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install")
    if not complete.exists():
        run(interpreter(corner.python), "-m", "venv", "--clear", environment)
        run(*pip, "-c", constraints(folder), corner.tried, *TOOLS)
        complete.touch()
    run(*pip, "--no-deps", "--force-reinstall", wheel(python, corner, environment.parent))
    return python


def test(corner: Corner, python: Path, folder: Path, options: list[str]) -> None:
    """Run the tests and note what came out."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)  # of the corner before
    command = [
        str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu",
        f"--junitxml={report}", *(options or (CORE_OF_JAX if corner.jax else CORE)),
    ]  # fmt: skip
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(command, cwd=ROOT, env=environ, check=False)
    if not report.exists():
        raise RuntimeError("pytest wrote no report")
    count(corner, report.read_text(encoding="utf-8"))


def count(corner: Corner, report: str) -> None:
    """Take the numbers, and what failed, from a report in JUnit's format."""
    suite = next(ET.fromstring(report).iter("testsuite"))
    numbers = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    corner.counts = {
        "passed": 2 * numbers["tests"] - sum(numbers.values()),
        "failed": numbers["failures"],
        "errors": numbers["errors"],
        "skipped": numbers["skipped"],
    }
    corner.failed = [
        f"{case.get('classname', '')}::{case.get('name', '')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]


def try_corner(corner: Corner, folder: Path, kept: Path | None, options: list[str]) -> None:
    """Make one environment, run the tests in it, delete it unless it is kept."""
    start = time.monotonic()
    print(f"== Python {corner.python}, {corner.tried}", flush=True)
    environment = (kept or folder) / f"py{corner.python}-{corner.tried.replace('==', '-')}"
    try:
        test(corner, install(corner, folder, environment), folder, options)
    except (RuntimeError, StopIteration) as error:
        corner.trouble = str(error) or "the wheel was not built"
        print(corner.trouble, file=sys.stderr)
    finally:
        corner.seconds = time.monotonic() - start
        if kept is None:
            shutil.rmtree(environment, ignore_errors=True)


def table(tried: list[Corner]) -> str:
    """Return what came out, one line for each corner."""
    head = f"{'Python':8}{'with':15}{'passed':>8}{'failed':>8}{'errors':>8}{'skipped':>9}{'s':>6}"
    lines = [head]
    for corner in tried:
        numbers = [corner.counts.get(n, "-") for n in ("passed", "failed", "errors", "skipped")]
        verdict = "passes" if corner.passes else "FAILS"
        lines.append(
            f"{corner.python:8}{corner.tried:15}{numbers[0]:>8}{numbers[1]:>8}{numbers[2]:>8}"
            f"{numbers[3]:>9}{corner.seconds:>6.0f}  {verdict}"
        )
        lines += [f"    {name}" for name in corner.failed]
        lines += [f"    {corner.trouble.splitlines()[0]}"] if corner.trouble else []
    return "\n".join(lines)


def wanted(arguments: argparse.Namespace) -> list[Corner]:
    """Return the corners that the command line asks for, or all that are declared."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    pinned = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    if arguments.python or arguments.torch or arguments.jax:
        pythons = arguments.python or [declared(pyproject)[0][0]]
        torch = arguments.torch or ([] if arguments.jax else [pinned[1]])
        found = [Corner(p, t) for p in pythons for t in torch]
        return found + [Corner(p, "", j) for p in pythons for j in arguments.jax or []]
    return corners(pyproject, pinned[1], newest_torch())


def main() -> int:
    """Try the corners one after the other and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", help="such as 3.12; repeat for more")
    parser.add_argument("--torch", action="append", help="such as 2.9.1; repeat for more")
    parser.add_argument("--jax", action="append", help="such as 0.8.0; repeat for more")
    parser.add_argument("--keep", type=Path, help="where environments and wheels stay")
    parser.add_argument("options", nargs="*", help="after --: for pytest, instead of the core")
    arguments = parser.parse_args()
    tried: list[Corner] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # also where the shell had SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="try_versions-") as folder:
            for corner in wanted(arguments):
                tried.append(corner)
                try_corner(corner, Path(folder), arguments.keep, arguments.options)
    except KeyboardInterrupt:
        print("\ninterrupted; what was made is deleted", file=sys.stderr)
        return 130
    finally:
        if tried:
            print(table(tried))
    return 0 if all(corner.passes for corner in tried) else 1


if __name__ == "__main__":
    sys.exit(main())
