"""A model larger than its limit, streamed from a disk: time beside the bound, peak beside the plan.

In a process of its own (``python -m``), for a peak belongs to a process. The model is written to a
safetensors file first and never is in memory as a whole.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyattn.hooks.layerwise_offload import offload
from polyattn.hooks.layerwise_offload.devices.host import Reader, Reading
from polyattn.hooks.layerwise_offload.exact_memory import Block
from polyattn.hooks.layerwise_offload.mapped import FilePart, MappedFile
from polyattn.hooks.layerwise_offload.offload_plan import OffloadPlan
from polyattn.hooks.layerwise_offload.offload_report import OffloadReport
from polyattn.hooks.layerwise_offload.process_memory import begin_peak, peak

__all__ = ["Stack", "measure", "write_weights"]

WIDTH, HEADS = 1024, 16


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    """A transformer of equal blocks, 48 MiB each in float32."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def write_weights(path: Path, blocks: int) -> int:
    """Write a safetensors file of random weights, a tensor at a time; return its size."""
    with torch.device("meta"):
        shapes = {name: list(p.shape) for name, p in Stack(blocks).state_dict().items()}
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(torch.Size(shape).numel())
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draw = torch.Generator().manual_seed(0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=draw) * 0.02
            if "norm" in name and name.endswith("weight"):
                values += 1.0
            file.write(values.numpy().tobytes())
    return path.stat().st_size


def measure(path: Path, blocks: int, budget: str, tokens: int, passes: int) -> dict[str, Any]:
    """Stream the model within the budget, and return times and peaks, planned and real.

    After each pass the same computation runs alone, the same bytes are read alone, and then both
    at once without offload between them: a disk that others use changes its rate by the second.
    """
    with torch.device("meta"):
        model = Stack(blocks).eval().requires_grad_(False)
    x = torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(1))
    file, cpu = MappedFile(path), torch.device("cpu")
    rounds: list[_Round] = []
    with torch.no_grad():
        _out_of_cache(file)
        handle = offload(model, budget, "cpu", weights=path, sample=x)
        plan = handle.plan
        bare = _Bare(model, plan, file)
        for _ in range(passes):
            _out_of_cache(file)
            begin_peak(cpu)
            began = time.perf_counter()
            out = model(x)
            took, most = time.perf_counter() - began, peak(cpu)
            rounds.append(_Round(took, most, *bare.times(x)))
        bare.close()
    return _found(rounds, handle.report(), plan) | {
        "blocks": blocks, "tokens": tokens, "weights_bytes": path.stat().st_size,
        "checksum": float(out.double().sum()),
    }  # fmt: skip


class _Round(NamedTuple):
    """What was measured one after the other, in seconds, and the most bytes that a pass held."""

    pass_s: float
    peak_bytes: int
    compute_s: float
    read_s: float
    both_s: float

    @property
    def bound_s(self) -> float:
        return max(self.compute_s, self.read_s)


def _found(rounds: Sequence[_Round], report: OffloadReport, plan: OffloadPlan) -> dict[str, Any]:
    def middle(value: Callable[[_Round], float]) -> float:
        return statistics.median(map(value, rounds))

    seconds, most = middle(lambda each: each.pass_s), max(each.peak_bytes for each in rounds)
    return {
        "streamed": len(plan.streamed), "budget_bytes": plan.budget_bytes, "readers": plan.readers,
        "pass_s": seconds, "predicted_s": plan.pass_s,
        "compute_s": middle(lambda each: each.compute_s),
        "read_s": middle(lambda each: each.read_s), "both_s": middle(lambda each: each.both_s),
        "over_bound": middle(lambda each: each.pass_s / each.bound_s),
        "over_both": middle(lambda each: each.pass_s / each.both_s),
        "over_predicted": seconds / plan.pass_s if plan.pass_s else None,
        "stall_s": sum(row.stall_s for row in report.units) / max(report.passes, 1),
        "peak_bytes": most, "planned_peak_bytes": plan.peak_bytes,
        "over_planned_peak": most / plan.peak_bytes,
        "rounds": [each._asdict() for each in rounds],
    }  # fmt: skip


class _Bare:
    """What a pass computes and reads, without offload: each alone, and both at once."""

    def __init__(self, model: Stack, plan: OffloadPlan, file: MappedFile) -> None:
        self._count, self._file = len(model.blocks), file
        self._here = [model.get_submodule(name) for name in plan.resident]
        self._parts = [_part(file, name) for name in plan.streamed]
        self._reader = Reader()
        self._reader.use(plan.readers or self._reader.threads)

    def times(self, x: Tensor) -> tuple[float, float, float]:
        """Return the seconds of computing, of reading, and of both at once."""
        memory = Block(max(part.nbytes for part in self._parts)).whole
        memory[::4096] = 0  # its pages are there, as those of a slot are
        here = self._here or [_Block().eval().requires_grad_(False)]

        def compute() -> None:
            y = x
            for place in range(self._count):  # blocks are equal, so those that stay stand for all
                y = here[place % len(here)](y)

        def read() -> Reading:
            _out_of_cache(self._file)
            view = memory.numpy().data
            return self._reader.read([(part, view[: part.nbytes]) for part in self._parts])

        def both() -> None:
            reading = read()
            compute()
            reading.result()

        return _seconds(compute), _seconds(lambda: read().result()), _seconds(both)

    def close(self) -> None:
        """End the threads that read."""
        self._reader.close()


def _part(file: MappedFile, block: str) -> FilePart:
    """Return where a block's weights lie in a safetensors file."""
    with file.path.open("rb") as opened:
        length = struct.unpack("<Q", opened.read(8))[0]
        header = json.loads(opened.read(length))
    spans = [header[name]["data_offsets"] for name in header if name.startswith(block + ".")]
    start, end = min(span[0] for span in spans), max(span[1] for span in spans)
    return FilePart(file, 8 + length + start, end - start)


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _out_of_cache(file: MappedFile) -> None:
    """Have the disk read, not the page cache: a model that does not fit is in no cache either."""
    if hasattr(os, "posix_fadvise"):
        os.fsync(file.descriptor)
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Measure, and print the record as JSON."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("path", type=Path)
    made.add_argument("blocks", type=int)
    made.add_argument("budget")
    made.add_argument("tokens", type=int)
    made.add_argument("passes", type=int)
    given = made.parse_args()
    found = measure(given.path, given.blocks, given.budget, given.tokens, given.passes)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
