"""Runs a traced program again with perturbed weights, each time in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyattn.cli.printing import note
from polyattn.cli.supervise import run_child, scratch_folder
from polyattn.cli.trace_table import printable
from polyattn.errors import TraceError
from polyattn.trace import Trace, read
from polyattn.trace.format.record import STATISTICS

__all__ = ["recording_options", "reruns"]

_TAIL = 2000

Unsuitable = Callable[[Trace, Trace], str]


def reruns(
    reference: Trace, program: Sequence[str], count: int, unsuitable: Unsuitable
) -> Iterator[Trace]:
    """Yield the traces of `count` reruns of a program, as the reference was recorded.

    The program's stdout is dropped, and its stderr is shown if it fails. `unsuitable` says why a
    trace is no rerun of the reference. Raises TraceError where it has something to say, and for a
    program that ends with another exit code than 0.
    """
    options = recording_options(reference)
    for seed in range(1, count + 1):
        begin = time.perf_counter()
        with scratch_folder("polyattn-calibrate-") as folder:
            found = _chosen(reference, _record(program, options, seed, folder), unsuitable)
        seconds = time.perf_counter() - begin
        note(
            f"polyattn trace calibrate: rerun {seed} of {count}: {len(found.records)} records, "
            f"{seconds:.1f} s"
        )
        yield found


def recording_options(reference: Trace) -> list[str]:
    """Return the options of `polyattn trace record` with which a trace was recorded."""
    header, asked = reference.header, reference.header.selection
    if header.framework != "torch" or header.world > 1:
        what = f"{header.world} ranks" if header.world > 1 else header.framework
        raise TraceError(
            f"got a reference of {printable(what)}, and `polyattn trace record` reruns torch "
            "programs of one process: record the reruns as you recorded the reference, and name "
            "their files."
        )
    found = [f"--{name}" for name in ("gradients", "parameters") if asked.get(name) is True]
    steps, stats = asked.get("steps"), asked.get("stats")
    if isinstance(steps, list):
        found += ["--steps", ",".join(map(str, steps))]
    if isinstance(stats, list):
        found += ["--stats", ",".join(name for name in stats if name in STATISTICS)]
    layers = asked.get("layers")
    return found if layers is None else [*found, "--layers", _pattern(layers, header.modules)]


def _pattern(layers: Any, modules: Mapping[str, str]) -> str:
    if isinstance(layers, str) and not layers.startswith("function "):
        return layers
    if isinstance(layers, list) and layers and all(isinstance(one, str) for one in layers):
        if all(one in modules for one in layers):
            return f"^(?:{'|'.join(map(re.escape, layers))})$"
        return "|".join(f"(?:{one})" for one in layers)
    raise TraceError(
        f"got a reference whose layers were chosen by a {printable(str(layers))[:80]}, expected a "
        "regular expression: record the reruns as you recorded the reference, and name their files."
    )


def _record(program: Sequence[str], options: Sequence[str], seed: int, folder: Path) -> list[Path]:
    """Run the program once; return the files of its models."""
    said, errors = folder / "said.json", folder / "stderr.txt"
    command = [
        sys.executable, "-m", "polyattn", "trace", "record", "--perturb", str(seed),
        "--out", str(folder / "run.jsonl"), f"--json={said}", *options, "--", *program,
    ]  # fmt: skip
    with errors.open("wb") as stderr:
        code = run_child(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
        ).returncode
    if code or not said.exists():
        last = errors.read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()
        raise TraceError(
            f"got exit code {code} of rerun {seed} of {' '.join(program)}, expected 0. It said: "
            f"{last or 'nothing'}"
        )
    return [Path(one["path"]) for one in json.loads(said.read_text(encoding="utf-8"))["traces"]]


def _chosen(reference: Trace, paths: Sequence[Path], unsuitable: Unsuitable) -> Trace:
    """The trace of the reference's model, of those of a program's models."""
    reasons = []
    for path in paths:
        found = read(path)
        if reference.header.modules and found.header.modules != reference.header.modules:
            continue
        reason = unsuitable(reference, found)
        if not reason:
            return found
        reasons.append(reason)
    if reasons:
        raise TraceError(f"got a rerun of the program that is of no use: {reasons[0]}.")
    models = ", ".join(printable(path.name) for path in paths) or "none"
    raise TraceError(
        f"got a program that called {len(paths)} models ({models}), and none with the reference's "
        "modules; expected the program that the reference is of."
    )
