"""Random schedules on the simulated device: whatever order copies and computations take."""

from __future__ import annotations

import contextlib
import ctypes
import random

import torch
from torch import nn

from polyattn.hooks.layerwise_offload import offload
from polyattn.hooks.layerwise_offload.devices.simulated import SimulatedCarrier

__all__ = ["SimulatedModel", "wrong_in"]


class _Block(nn.Module):
    """Its computation reads the weight later, at the address that it has when it is called."""

    def __init__(self, index: int, carrier: SimulatedCarrier, seconds: float) -> None:
        super().__init__()
        weight = torch.full((1000 + index % 3 * 500,), index, dtype=torch.uint8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.carrier, self.seconds, self.fails = carrier, seconds, False

    def forward(self, seen: list[set[int]]) -> list[set[int]]:
        if self.fails:
            raise ValueError("a block fails")
        address, size = self.weight.data_ptr(), self.weight.numel()
        self.carrier.launch(lambda: seen.append(set(ctypes.string_at(address, size))), self.seconds)
        return seen


class SimulatedModel(nn.Module):
    """Blocks whose weights are their number, so that a wrong byte is seen."""

    def __init__(self, count: int, carrier: SimulatedCarrier, seconds: float = 1e-6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(index, carrier, seconds) for index in range(count))
        self.order = list(range(count))
        self.eval()

    @property
    def members(self) -> list[_Block]:
        """The blocks."""
        return [block for block in self.blocks if isinstance(block, _Block)]

    def forward(self, seen: list[set[int]]) -> list[set[int]]:
        for index in self.order:
            self.blocks[index](seen)
        return seen


def wrong_in(seed: int) -> str | None:
    """Run one schedule: passes that skip, repeat and fail; return what was wrong, if anything."""
    lot, carrier = random.Random(seed), SimulatedCarrier(seed)
    model = SimulatedModel(lot.randint(2, 7), carrier)
    handle = offload(model, device=carrier, depth=lot.randint(1, 3))
    seen: list[set[int]] = []
    want: list[set[int]] = []
    for _ in range(lot.randint(1, 4)):
        want += _one_pass(model, lot, seen)
    carrier.synchronize()
    handle.detach()
    if seen != want:
        return f"seed {seed}: read {seen}, expected {want}"
    left = [
        index for index, block in enumerate(model.members) if set(block.weight.tolist()) != {index}
    ]
    return f"seed {seed}: after detaching, blocks {left} are not what they were" if left else None


def _one_pass(model: SimulatedModel, lot: random.Random, seen: list[set[int]]) -> list[set[int]]:
    """Call the model in some order, maybe with a block that fails; return what must be read."""
    count = len(model.blocks)
    model.order = list(range(count))
    if lot.random() < 0.5:
        model.order = [lot.randrange(count) for _ in range(lot.randint(0, 9))]
    failing = lot.randrange(count) if lot.random() < 0.2 else None
    if failing is not None:
        model.members[failing].fails = True
    with contextlib.suppress(ValueError):
        model(seen)
    for block in model.members:
        block.fails = False
    ends = model.order.index(failing) if failing in model.order else len(model.order)
    return [{index} for index in model.order[:ends]]
