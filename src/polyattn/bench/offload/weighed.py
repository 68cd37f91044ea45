"""What offload holds: weights on the device at the most, and host memory that it locks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from polyattn.bench.offload.schedules import SimulatedModel
from polyattn.hooks.layerwise_offload import offload
from polyattn.hooks.layerwise_offload.devices.simulated import SimulatedCarrier
from polyattn.hooks.layerwise_offload.exact_memory import locked_bytes
from polyattn.hooks.layerwise_offload.process_memory import held, trim

__all__ = ["locked", "peaks"]

_UNITS, _DEPTH, _LAYERS = 40, 2, 6


def peaks(slack: int) -> dict[str, Any]:
    """Return the row of weights on the simulated device, which counts what it gives out."""
    carrier = SimulatedCarrier(1)
    model = SimulatedModel(_UNITS, carrier)
    with offload(model, device=carrier, depth=_DEPTH) as handle:
        for _ in range(3):
            model([])
        largest, outside = handle.plan.slot_bytes, handle.plan.outside_bytes
        device_bytes = carrier.slots_bytes + outside
    limit = (_DEPTH + 1) * largest + outside + slack
    text = (
        f"{device_bytes:,} bytes of weights on the simulated device for {_UNITS} units, "
        f"{device_bytes / largest:.2f} units of {largest:,} at depth {_DEPTH}"
    )
    return {
        "name": "device weights", "text": text, "device_bytes": device_bytes, "limit_bytes": limit,
        "met": device_bytes <= limit,
    }  # fmt: skip


def locked(at_most: float) -> dict[str, Any]:
    """Return the row of host memory: what the process holds for weights, locked where CUDA is."""
    cpu, carrier = torch.device("cpu"), SimulatedCarrier(None)
    layers = [nn.Linear(4096, 4096, bias=False) for _ in range(_LAYERS)]
    model = nn.Sequential(*layers).eval().requires_grad_(False)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    without = held(cpu) - weights
    if torch.cuda.is_available():
        with offload(model, device="cuda"):
            ratio, how = locked_bytes() / weights, "locked"
    else:
        with offload(model, device=carrier):
            trim()
            ratio = (held(cpu) - without - carrier.slots_bytes) / weights
        how = "resident (there is no CUDA to lock it for)"
    text = f"{ratio:.4f} x the weights of host memory {how}"
    return {"name": "host memory", "text": text, "ratio": ratio, "met": ratio <= at_most}
