"""The facts of a model that was never loaded, from its safetensors files: units by their names."""

from __future__ import annotations

import re
import time
from dataclasses import replace

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.devices.host import Reader
from polyattn.hooks.layerwise_offload.exact_memory import Block
from polyattn.hooks.layerwise_offload.mapped import FilePart
from polyattn.hooks.layerwise_offload.offload_plan import Facts
from polyattn.hooks.layerwise_offload.safetensors_files import SafetensorsFiles

__all__ = ["facts_of_checkpoint", "measured_rate"]

_BLOCK = re.compile(r"((?:.*?\.)?\d+)\.")
_SAMPLE = 1 << 28


def facts_of_checkpoint(
    files: SafetensorsFiles, *, tokens: int | None = None, flops: float | None = None
) -> Facts:
    """Return bytes and, from `tokens` a pass and `flops` a second, the computation of each block.

    A block is what has a number in its name, up to the first one: ``model.layers.7``. Its
    computation is taken to be two operations for each weight and token, as matrix products are.
    """
    sizes: dict[str, int] = {}
    weights: dict[str, int] = {}
    outside = 0
    for name, tensor in files.tensors.items():
        found = _BLOCK.match(name)
        if found is None:
            outside += tensor.nbytes
            continue
        block = found[1]
        sizes[block] = sizes.get(block, 0) + tensor.nbytes
        weights[block] = weights.get(block, 0) + tensor.nbytes // tensor.dtype.itemsize
    if not sizes:
        raise OffloadError(
            "got a checkpoint without numbered blocks in its names, expected names such as "
            "'model.layers.0.mlp.weight': plan from the model itself, offload(model, ...).plan"
        )
    names = sorted(sizes, key=_in_order)
    facts = Facts([(name, sizes[name]) for name in names], outside_bytes=outside)
    if tokens is None or flops is None:
        return facts
    return replace(facts, compute_s=[2.0 * weights[name] * tokens / flops for name in names])


def _in_order(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def measured_rate(files: SafetensorsFiles, most: int = _SAMPLE) -> float:
    """Return bytes a second that are read from the files now, of `most` bytes."""
    reader = Reader()
    try:
        chosen, total = [], 0
        for tensor in sorted(files.tensors.values(), key=lambda tensor: -tensor.nbytes):
            chosen.append(FilePart(tensor.file, tensor.start, tensor.nbytes))
            total += tensor.nbytes
            if total >= most:
                break
        slot = Block(max((part.nbytes for part in chosen), default=0)).whole.fill_(0).numpy()
        began = time.perf_counter()
        reader.read([(part, slot[: part.nbytes].data) for part in chosen]).result()
        seconds = time.perf_counter() - began
        return total / seconds if total else 0.0
    finally:
        reader.close()
