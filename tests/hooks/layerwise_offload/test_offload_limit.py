"""A model larger than its limit runs within it: the peak that the system saw, and the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from polyattn.bench.offload.disk_run import WIDTH, Stack, write_weights
from polyattn.hooks.layerwise_offload.process_memory import begin_peak

BLOCKS, ROOM = 10, 260 << 20
RUN = """
import json, os, sys
from pathlib import Path
import torch
from polyattn.bench.offload.disk_run import WIDTH, Stack
from polyattn.hooks import offload
from polyattn.hooks.layerwise_offload.process_memory import begin_peak, held, peak
torch.set_num_threads(1)
cpu, path, room, changes = torch.device("cpu"), sys.argv[1], int(sys.argv[2]), sys.argv[3]
def leave_cache():
    for each in (Path(path), *Path(changes).glob("*.weights")) if sys.argv[4] == "cold" else ():
        with each.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
with torch.device("meta"):
    model = Stack({blocks}).eval().requires_grad_(False)
x = torch.linspace(-1, 1, 4 * WIDTH).view(1, 4, WIDTH)
torch.nn.Linear(WIDTH, WIDTH)(x)
before = held(cpu)
budget = before + room
begin_peak(cpu)
with torch.no_grad():
    handle = offload(model, budget, "cpu", weights=path, disk=changes, sample=x)
    leave_cache()  # measured with files that were cached, and now they are not
    out = model(x)
    for name in handle.units[:3]:
        leave_cache()
        with handle.loaded(name):
            model.get_submodule(name).up.weight.data.mul_(0.5)
    after = model(x)
print(json.dumps({{
    "before": before, "peak": peak(cpu), "budget": budget, "planned": handle.plan.peak_bytes,
    "out": out.flatten().tolist(), "after": after.flatten().tolist(),
    "changed": list(handle.units[:3]),
}}))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or not begin_peak(torch.device("cpu")),
    reason="the system does not say the peak since a moment",
)
@pytest.mark.parametrize("cache", ["warm", "cold"])
def test_a_model_larger_than_its_limit_runs_within_it(tmp_path: Path, cache: str) -> None:
    path = tmp_path / "model.safetensors"
    nbytes = write_weights(path, BLOCKS)
    assert nbytes > ROOM * 1.8
    code = RUN.format(blocks=BLOCKS)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(ROOM), str(tmp_path / "changed"), cache],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["peak"] <= found["budget"], (found["planned"], nbytes)
    assert found["peak"] < found["before"] + nbytes
    with torch.device("meta"):
        model = Stack(BLOCKS).eval().requires_grad_(False)
    model.load_state_dict(load_file(path), assign=True)
    x = torch.linspace(-1, 1, 4 * WIDTH).view(1, 4, WIDTH)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            assert torch.equal(model(x).flatten(), torch.tensor(found["out"]))
            for name in found["changed"]:
                model.get_submodule(name).up.weight.mul_(0.5)
            assert torch.equal(model(x).flatten(), torch.tensor(found["after"]))
    finally:
        torch.set_num_threads(threads)
