"""What a call needs beside its arguments and its output, measured in a process of its own.

``python -m polyattn.bench.cpu.memory JSON`` runs one call and prints how far the resident memory
rose above inputs and output while it ran (Linux; null elsewhere).
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

from polyattn.bench.cpu.cases import Case, Size
from polyattn.errors import PolyattnError

__all__ = ["EXTRA_GOAL_MIB", "cases", "extra_mib", "rows"]

EXTRA_GOAL_MIB = 16.0
"""The scores of these calls would take 512 MiB or more."""
_MMAP_THRESHOLD = -3  # glibc's name for it, M_MMAP_THRESHOLD


def cases(length: int = 16384) -> list[Case]:
    """Return the calls: one head, so that a matrix of scores would be far above all else."""
    size = Size(1, 1, 1, length, length, 64)
    return [
        Case(f"memory {mask}", size, dtype, mask)
        for mask in ("none", "causal")
        for dtype in ("float32", "bfloat16")
    ]


def rows(backend: str, length: int) -> list[dict[str, Any]]:
    """Measure all calls on the backend and on torch's default route."""
    found = []
    for case in cases(length):
        ours, torchs = (extra_mib(case, which) for which in (backend, ""))
        goal = EXTRA_GOAL_MIB
        row = {"name": case.name, "ours_mib": ours, "torch_mib": torchs, "goal_mib": goal}
        found.append(row if ours is None else {**row, "met": ours <= goal})
    return found


def extra_mib(case: Case, backend: str) -> float | None:
    """Run the call in a process of its own; `backend` "" is torch's F.sdpa."""
    asked = json.dumps({**dataclasses.asdict(case), "backend": backend})
    command = [sys.executable, "-m", "polyattn.bench.cpu.memory", asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = done.stderr.strip().splitlines()[-1:]
        raise PolyattnError(f"got exit code {done.returncode} for {case.name}: {tail}")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def _measured(asked: dict[str, Any]) -> float | None:
    import ctypes

    import torch

    from polyattn.bench.cpu.case_arrays import Inputs
    from polyattn.bench.cpu.ways import ours, torch_ways

    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, 1 << 16)  # what is freed is given back, and seen when reused
    backend, size = asked.pop("backend"), asked.pop("size")
    case = Case(**asked, size=Size(**size))
    small = dataclasses.replace(case, size=dataclasses.replace(case.size, q_len=256, kv_len=256))
    extra: float | None = None
    for one in (small, case):  # the small call loads libraries and starts threads
        inputs = Inputs.of(one)
        way = ours(inputs, backend) if backend else next(iter(torch_ways(inputs)))
        before = _resident("VmRSS")
        known = _forget_peak()
        with way.scope(), torch.no_grad():
            out = way.call(inputs.q, inputs.k, inputs.v)
        if known and before is not None and (peak := _resident("VmHWM")) is not None:
            extra = round(max(0.0, peak - before - out.nbytes / 2**20), 2)
    return extra


def _resident(name: str) -> float | None:
    """Return a size from the status of this process, in MiB."""
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            line = next(line for line in lines if line.startswith(name + ":"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) / 1024


def _forget_peak() -> bool:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measured(json.loads(sys.argv[1]))))
