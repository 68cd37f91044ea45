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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyattn.hooks.layerwise_offload import offload
from polyattn.hooks.layerwise_offload.mapped import MappedFile
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
    """Stream the model within the budget, and return times and peaks, planned and real."""
    with torch.device("meta"):
        model = Stack(blocks).eval().requires_grad_(False)
    x = torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(1))
    file = MappedFile(path)
    cpu = torch.device("cpu")
    with torch.no_grad():
        _out_of_cache(file)
        handle = offload(model, budget, "cpu", weights=path, sample=x)
        begin_peak(cpu)
        seconds = []
        for _ in range(passes):
            _out_of_cache(file)
            began = time.perf_counter()
            out = model(x)
            seconds.append(time.perf_counter() - began)
    report, plan = handle.report(), handle.plan
    return {
        "streamed": len(plan.streamed), "blocks": blocks, "tokens": tokens,
        "weights_bytes": path.stat().st_size, "budget_bytes": plan.budget_bytes,
        "pass_s": statistics.median(seconds), "seconds": seconds,
        "predicted_s": plan.pass_s, "compute_s": plan.compute_s, "copy_s": plan.copy_s,
        "bound_s": plan.bound_s,
        "over_bound": statistics.median(seconds) / plan.bound_s if plan.bound_s else None,
        "stall_s": sum(row.stall_s for row in report.units) / max(report.passes, 1),
        "over_predicted": statistics.median(seconds) / plan.pass_s if plan.pass_s else None,
        "peak_bytes": peak(cpu), "planned_peak_bytes": plan.peak_bytes,
        "over_planned_peak": peak(cpu) / plan.peak_bytes,
        "checksum": float(out.double().sum()),
    }  # fmt: skip


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
