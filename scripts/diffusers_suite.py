"""Run diffusers' own tests of its transformers, stock and on polyattn, and compare each test.

``scripts/diffusers_suite.py CHECKOUT`` takes a checkout of https://github.com/huggingface/diffusers
of the installed version, or its ``tests`` folder alone in a folder, and runs
``tests/models/transformers`` on the CPU; ``--files flux wan`` runs those of these models. Ways to
run them:

- ``stock``: diffusers alone, what the others are compared with;
- ``active``: polyattn registered, and the active attention backend;
- ``routed``: within ``route_sdpa``, too, for the processors that call torch's function.

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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch_suite import Recorder, differences, read_log

WAYS = ("stock", "active", "routed")
MATCH = "not compile and not quant"
FOLDER = Path("tests/models/transformers")

Outcomes = dict[str, tuple[str, str]]


def run_child(way: str, file: str, match: str, log: Path, done: list[str]) -> int:
    """Run one file in this process, one way, without the tests of `done`."""
    import pytest

    arguments = [file, "-q", "--no-header", "-p", "no:cacheprovider", "-k", match]
    arguments += [part for test in done for part in ("--deselect", test)]
    with ExitStack() as around:
        ran: list[Any] = []
        if way != "stock":
            ran = _on_polyattn(around, routed=way == "routed")
        code = pytest.main(arguments, plugins=[Recorder(log)])
    log.with_name("calls").write_text(str(len(ran)))
    return code


def _on_polyattn(around: ExitStack, routed: bool) -> list[Any]:
    """Make polyattn the active backend; return the list of what it runs."""
    from diffusers.models import attention_dispatch as home

    from polyattn import record_selections
    from polyattn.integrations.diffusers import register
    from polyattn.integrations.sdpa_patch import route_sdpa

    register()
    home._AttentionBackendRegistry.set_active_backend(home.AttentionBackendName("polyattn"))
    if routed:
        around.enter_context(route_sdpa())
    return around.enter_context(record_selections())


def outcomes(script: str, way: str, checkout: Path, file: Path, match: str) -> tuple[Outcomes, int]:
    """Run a file one way, in processes of `script`, as many as crash.

    Returns each test's outcome and error, and how many calls polyattn ran.
    """
    found: Outcomes = {}
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        log, done = Path(folder) / "log", Path(folder) / "done"
        while True:
            log.write_text("")
            done.write_text(json.dumps(list(found)))
            command = [sys.executable, str(Path(script).resolve()), str(checkout)]
            command += ["--child", way, "--log", str(log), "--done", str(done)]
            command += ["--match", match, "--files", str(file)]
            ended = subprocess.run(
                command, env=environ, cwd=checkout, capture_output=True, text=True, check=False
            )
            crashed = read_log(log, found, ended.returncode)
            if not crashed:
                calls = log.with_name("calls")
                number = int(calls.read_text()) if calls.exists() else 0
                if not found and ended.returncode not in (0, 5):
                    found[f"{file.name} (process)"] = "failed", ended.stderr[-2000:]
                return found, number


def compare(
    script: str, checkout: Path, files: list[Path], ways: list[str], match: str
) -> tuple[int, list[dict[str, Any]]]:
    """Run the files in each way, print what was found, return number of tests and differences."""
    tests, apart = 0, []
    for file in files:
        stock, _ = outcomes(script, "stock", checkout, file, match)
        tests += len(stock)
        _print_counts(file, "stock", stock, "")
        for way in ways:
            ours, calls = outcomes(script, way, checkout, file, match)
            _print_counts(file, way, ours, f"; {calls} calls ran on polyattn")
            for row in differences(stock, ours):
                apart.append({"file": file.name, "way": way, **row})
                print(f"  {row['verdict']}: {row['test'].partition('::')[2]}")
                for name in ("stock", "ours"):
                    print(f"    {name}: {' '.join(row[name] or ('missing',))[:300]}")
    return tests, apart


def _print_counts(file: Path, way: str, found: Outcomes, more: str) -> None:
    counts = Counter(outcome for outcome, _ in found.values())
    text = ", ".join(f"{n} {kind}" for kind, n in counts.most_common())
    print(f"{file.name} {way}: {text or 'no tests'}{more}", flush=True)


def main() -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument(
        "--files", nargs="*", default=[], help="models, as in the names of test files"
    )
    parser.add_argument("--match", default=MATCH, help="pytest's -k (%(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS[1:]), help="of %(default)s")
    for hidden in ("--child", "--log", "--done"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        done = json.loads(Path(asked.done).read_text())
        return run_child(asked.child, asked.files[0], asked.match, Path(asked.log), done)
    ways = [way for way in asked.ways.split(",") if way]
    if unknown := [way for way in ways if way not in WAYS[1:]]:
        parser.error(f"got --ways {unknown[0]}, expected some of {', '.join(WAYS[1:])}")
    checkout = asked.checkout.resolve()
    files = [
        file
        for file in sorted((checkout / FOLDER).glob("test_*.py"))
        if not asked.files or file.stem.removeprefix("test_models_transformer_") in asked.files
    ]
    files = [file.relative_to(checkout) for file in files]
    tests, apart = compare(__file__, checkout, files, ways, asked.match)
    print(f"{tests} tests, {len(apart)} differences")
    return 2 if not tests else int(bool(apart))


if __name__ == "__main__":
    sys.exit(main())
