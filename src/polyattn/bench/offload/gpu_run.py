"""Stacks like Wan's and Flux's streamed to a GPU, beside accelerate and diffusers in the same run.

Each way gets the same stack with the same weights in
host memory, and its time is held against max(compute, transfer), both measured here.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polyattn.hooks.layerwise_offload import offload

__all__ = ["STACKS", "measure"]

STACKS = {"like Wan 1.3B": (1536, 12, 8960, 30, 8192), "like Flux": (3072, 24, 12288, 19, 4608)}
"""Of each: width, heads, inner width, blocks, tokens of a pass."""
_GOAL = 1.05
_CUDA = "cuda"


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class _Stack(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width, heads, inner) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _ours(model: nn.Module) -> Callable[[], object]:
    return offload(model, device=_CUDA, depth=1).detach


def _accelerate(model: nn.Module) -> Callable[[], object]:
    accelerate = importlib.import_module("accelerate")
    accelerate.cpu_offload(model, _CUDA)
    return lambda: accelerate.hooks.remove_hook_from_module(model, recurse=True)


def _diffusers(model: nn.Module) -> Callable[[], object]:
    hooks = importlib.import_module("diffusers.hooks")
    hooks.apply_group_offloading(
        model, onload_device=torch.device(_CUDA), offload_device=torch.device("cpu"),
        offload_type="block_level", num_blocks_per_group=1, use_stream=True,
    )  # fmt: skip
    return lambda: None


WAYS = {"polyattn": _ours, "accelerate": _accelerate, "diffusers": _diffusers}


def measure(name: str, *, passes: int, folder: str | None = None) -> dict[str, Any]:
    """Return the row of a stack: each way's time beside the bound, and whether the bits agree."""
    *shape, tokens = STACKS[name]
    torch.manual_seed(0)
    with torch.device(_CUDA):  # where random numbers take no minute
        model = _Stack(*shape).to(torch.bfloat16).eval().requires_grad_(False)
    model.to("cpu")
    x = torch.randn(1, tokens, shape[0], dtype=torch.bfloat16, device=_CUDA)
    copy_s = _copy_seconds(model, passes)
    model.to(_CUDA)
    compute_s, want = _seconds(model, x, passes)
    model.to("cpu")
    bound = max(compute_s, copy_s)
    found: dict[str, Any] = {}
    for way, apply in WAYS.items():
        if way != "polyattn" and importlib.util.find_spec(way) is None:
            continue
        twin = copy.deepcopy(model)
        undo = apply(twin)
        torch.cuda.reset_peak_memory_stats()
        seconds, out = _seconds(twin, x, passes)
        found[way] = {
            "pass_s": seconds, "over_bound": seconds / bound, "same": torch.equal(out, want),
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }  # fmt: skip
        undo()
        del twin
        torch.cuda.empty_cache()
    ours = found["polyattn"]
    text = ", ".join(f"{way} {each['over_bound']:.2f} x" for way, each in found.items())
    return {
        "name": f"gpu, {name}", "text": f"max(compute, transfer) {bound:.4f} s: {text}",
        "compute_s": compute_s, "copy_s": copy_s, "ways": found,
        "device": torch.cuda.get_device_name(),
        "met": ours["over_bound"] <= _GOAL and ours["same"],
    }  # fmt: skip


def _seconds(model: nn.Module, x: Tensor, passes: int) -> tuple[float, Tensor]:
    """Return the median of a pass after two that are not counted, and what it gives."""
    times = []
    with torch.no_grad():
        for _ in range(passes + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            out = model(x)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:]), out


def _copy_seconds(model: _Stack, passes: int) -> float:
    """Return the seconds in which all blocks go to the device from locked memory."""
    blocks = [
        sum(p.numel() * p.element_size() for p in block.parameters()) for block in model.blocks
    ]
    pinned = torch.empty(max(blocks), dtype=torch.uint8, pin_memory=True)
    slot = torch.empty_like(pinned, device=_CUDA)
    times = []
    for _ in range(passes):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for nbytes in blocks:
            slot[:nbytes].copy_(pinned[:nbytes], non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
