"""Run torch's own attention tests on the CPU, stock and through polyattn, and compare each test.

``scripts/torch_suite.py PYTORCH/test`` runs what a PyTorch checkout's ``test`` folder holds of
SUITES; single files are run whole. Ways to run them:

- ``stock``: torch alone, what the others are compared with;
- ``dropin``: polyattn's function in the place of ``F.scaled_dot_product_attention``;
- ``routed``: within ``route_sdpa``, as ``polyattn run`` does;
- ``native``, ``native-routed``: the same while native_cpu is asked for, with fallback (the first
  by POLYATTN_BACKEND, the second by a scope), so that our own kernel runs what it can.

Exit code: 0 if each test has the same outcome in all ways, 1 if not, 2 if nothing ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SUITES = {
    "test_transformers.py": "",
    "test_native_mha.py": "",
    "nn/test_multihead_attention.py": "",
    "dynamo/test_sdpa.py": "",
    "inductor/test_fused_attention.py": "",
    "test_nestedtensor.py": "sdpa or scaled_dot_product or attention or transformer",
    "test_ops.py": "scaled_dot_product or multi_head_attention",
    "functorch/test_ops.py": "scaled_dot_product or multi_head_attention",
    "functorch/test_vmap.py": "scaled_dot_product",
    "test_flop_counter.py": "sdpa or attention",
}
"""torch's test files that call its function, with pytest's ``-k`` for those that test more."""

WAYS = ("stock", "dropin", "routed", "native", "native-routed")


class Recorder:
    """A pytest plugin: writes what begins and how it ends, a line each, so that crashes show."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("a")

    def _write(self, *line: str) -> None:
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._write("began", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        outcome = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if outcome == "skipped" else "xpassed"
        if report.when == "call" or outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            self._write(outcome, report.nodeid, crash.message if crash else "")

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._write("ended", nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write("failed", f"{report.nodeid} (collection)", str(report.longrepr)[-2000:])


def run_child(way: str, file: str, match: str, log: Path, done: Sequence[str]) -> int:
    """Run one file in this process, one way; `done` are tests that an earlier process ended."""
    import pytest
    import torch

    arguments = [file, "-q", "--no-header", "-p", "no:cacheprovider", "--rootdir", "/"]
    arguments += ["-c", os.devnull, *(["-k", match] if match else [])]
    plugins = [Recorder(log), _Skip(frozenset(done))]
    if way == "stock":
        return pytest.main(arguments, plugins=plugins)
    from polyattn import use_backend
    from polyattn.integrations.sdpa_patch import route_sdpa
    from polyattn.torch import scaled_dot_product_attention

    if way in ("dropin", "native"):
        functional: Any = torch.nn.functional
        functional.scaled_dot_product_attention = scaled_dot_product_attention
        return pytest.main(arguments, plugins=plugins)
    asked = way == "native-routed"
    request = use_backend("native_cpu", on_unsupported="fallback") if asked else None
    with route_sdpa(request=request):
        return pytest.main(arguments, plugins=plugins)


class _Skip:
    """Leaves out tests that an earlier process ran."""

    def __init__(self, done: frozenset[str]) -> None:
        self._done = done

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._done]


def outcomes(way: str, file: Path, match: str) -> dict[str, tuple[str, str]]:
    """Run a file one way, in as many processes as crash; returns each test's outcome and error."""
    found: dict[str, tuple[str, str]] = {}
    environ = os.environ | {"PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    environ["PYTHONPATH"] = os.pathsep.join([str(file.parent), os.environ.get("PYTHONPATH", "")])
    if way == "native":
        environ |= {"POLYATTN_BACKEND": "native_cpu", "POLYATTN_ON_UNSUPPORTED": "fallback"}
    with tempfile.TemporaryDirectory() as folder:
        while True:
            log = Path(folder) / "log"
            log.write_text("")
            done = Path(folder) / "done"
            done.write_text(json.dumps(list(found)))
            child = [sys.executable, __file__, "--child", way, "--log", str(log)]
            child += ["--done", str(done), "--match", match, str(file)]
            ended = subprocess.run(child, env=environ, capture_output=True, text=True, check=False)
            crashed = read_log(log, found, ended.returncode)
            if not crashed:
                if not found and ended.returncode not in (0, 5):
                    found[f"{file.name} (process)"] = "failed", ended.stderr[-2000:]
                return found


def read_log(log: Path, found: dict[str, tuple[str, str]], code: int) -> bool:
    """Add a process's outcomes; says whether it died within a test, which is noted as crashed."""
    running = None
    for line in map(json.loads, log.read_text().splitlines()):
        kind, test = line[0], line[1]
        if kind == "began":
            running = test
        elif kind == "ended":
            running = None
        elif kind == "failed" or found.get(test, ("",))[0] != "failed":
            found[test] = kind, line[2]
    if running is not None:
        found[running] = "crashed", f"the process ended with {code}"
    return running is not None


def kind_of(outcome: tuple[str, str] | None) -> str:
    """Return what is compared: the outcome, of failures with the class of the error."""
    if outcome is None:
        return "missing"
    return f"{outcome[0]} {outcome[1].partition(':')[0]}" if outcome[0] == "failed" else outcome[0]


def differences(
    stock: dict[str, tuple[str, str]], ours: dict[str, tuple[str, str]]
) -> list[dict[str, Any]]:
    """Return the tests whose outcome is not stock torch's."""
    found = []
    for test in sorted({*stock, *ours}):
        kinds = kind_of(stock.get(test)), kind_of(ours.get(test))
        if kinds[0] == kinds[1]:
            continue
        failing = [kind.startswith(("failed", "crashed")) for kind in kinds]
        verdict = {(False, True): "fails only ours", (True, False): "fails only stock"}.get(
            (failing[0], failing[1]), "differs"
        )
        both = {"stock": stock.get(test), "ours": ours.get(test)}
        found.append({"test": test, "verdict": verdict, **both})
    return found


def files_of(paths: Sequence[Path], match: str) -> list[tuple[Path, str]]:
    """Return the files to run, with their ``-k``; raises SystemExit for a path that is none."""
    found: list[tuple[Path, str]] = []
    for path in paths:
        if path.is_dir():
            held = [(path / name, match or k) for name, k in SUITES.items()]
            found += [(file, k) for file, k in held if file.is_file()]
        elif path.is_file():
            found.append((path, match))
        else:
            raise SystemExit(f"got {path}, expected a PyTorch checkout's test folder, or files")
    return found


def compare(files: Sequence[tuple[Path, str]], ways: Sequence[str]) -> dict[str, Any]:
    """Run the files in each way; print and return what was found."""
    report: dict[str, Any] = {"counts": {}, "differences": {way: [] for way in ways}}
    for file, match in files:
        stock = outcomes("stock", file.resolve(), match)
        _count(report, file, "stock", stock)
        for way in ways:
            ours = outcomes(way, file.resolve(), match)
            _count(report, file, way, ours)
            for row in differences(stock, ours):
                report["differences"][way].append({"file": str(file), **row})
                print(f"  {row['verdict']}: {row['test'].rpartition('::')[2]}")
                for name in ("stock", "ours"):
                    print(f"    {name}: {' '.join(row[name] or ('missing',))[:300]}")
    return report


def _count(report: dict[str, Any], file: Path, way: str, found: dict[str, tuple[str, str]]) -> None:
    counts = Counter(outcome for outcome, _ in found.values())
    report["counts"].setdefault(str(file), {})[way] = counts
    text = ", ".join(f"{n} {kind}" for kind, n in counts.most_common())
    print(f"{file.name} {way}: {text or 'no tests'}", flush=True)


def main() -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, help="a test folder, or test files")
    parser.add_argument("--match", default="", help="only tests that pytest's -k selects by this")
    parser.add_argument("--ways", default=",".join(WAYS[1:]), help="of %(default)s")
    parser.add_argument("--json", type=Path, help="write counts and differences to this file")
    for hidden in ("--child", "--log", "--done"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        done = json.loads(Path(asked.done).read_text())
        return run_child(asked.child, str(asked.paths[0]), asked.match, Path(asked.log), done)
    ways = [way for way in asked.ways.split(",") if way]
    if unknown := [way for way in ways if way not in WAYS[1:]]:
        parser.error(f"got --ways {unknown[0]}, expected some of {', '.join(WAYS[1:])}")
    report = compare(files_of(asked.paths, asked.match), ways)
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1))
    ran = sum(counts["stock"].total() for counts in report["counts"].values())
    apart = sum(map(len, report["differences"].values()))
    print(f"{ran} tests, {apart} differences")
    return 2 if not ran else int(apart > 0)


if __name__ == "__main__":
    sys.exit(main())
