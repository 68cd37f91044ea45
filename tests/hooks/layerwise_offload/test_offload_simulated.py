"""Every order in which a device may copy and compute: no wrong byte, and the time that was said."""

from __future__ import annotations

import contextlib
import ctypes
import random

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.hooks import offload
from polyattn.hooks.layerwise_offload.devices.simulated import SimulatedCarrier
from polyattn.hooks.layerwise_offload.predict import Step, predict


class Block(nn.Module):
    """Its computation reads the weight later, at the address that it has when it is called."""

    def __init__(self, index: int, carrier: SimulatedCarrier, seconds: float) -> None:
        super().__init__()
        size = 1000 + index % 3 * 500
        self.weight = nn.Parameter(
            torch.full((size,), index, dtype=torch.uint8), requires_grad=False
        )
        self.carrier = carrier
        self.seconds = seconds
        self.fails = False

    def forward(self, seen: list[set[int]]) -> list[set[int]]:
        if self.fails:
            raise ValueError("a block fails")
        address, size = self.weight.data_ptr(), self.weight.numel()
        self.carrier.launch(lambda: seen.append(set(ctypes.string_at(address, size))), self.seconds)
        return seen


class Model(nn.Module):
    def __init__(self, count: int, carrier: SimulatedCarrier, seconds: float = 1e-6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(index, carrier, seconds) for index in range(count))
        self.order = list(range(count))
        self.eval()

    def forward(self, seen: list[set[int]]) -> list[set[int]]:
        for index in self.order:
            self.blocks[index](seen)
        return seen


def one_schedule(seed: int) -> None:
    """Run a model over passes that skip, repeat and fail, its copies and computations by lot."""
    lot, carrier = random.Random(seed), SimulatedCarrier(seed)
    model = Model(lot.randint(2, 7), carrier)
    count = len(model.blocks)
    handle = offload(model, device=carrier, depth=lot.randint(1, 3))
    seen: list[set[int]] = []
    want: list[set[int]] = []
    for _ in range(lot.randint(1, 4)):
        model.order = list(range(count))
        if lot.random() < 0.5:
            model.order = [lot.randrange(count) for _ in range(lot.randint(0, 9))]
        failing = lot.randrange(count) if lot.random() < 0.2 else None
        for index in model.order:
            if index == failing:
                break
            want.append({index})
        if failing is not None:
            model.blocks[failing].fails = True
        with contextlib.suppress(ValueError):
            model(seen)
        for block in model.blocks:
            block.fails = False
    carrier.synchronize()
    assert seen == want, seed
    handle.detach()
    for index, block in enumerate(model.blocks):
        assert bool((block.weight == index).all()), seed


def test_no_schedule_reads_a_wrong_byte() -> None:
    for seed in range(600):
        one_schedule(seed)


@pytest.mark.parametrize("fault", ["fetch", "await_filled"])
def test_a_missing_order_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what orders copies and computations the same schedules go wrong."""
    real = SimulatedCarrier.fetch
    faults = {
        "fetch": lambda self, source, slot, nbytes, users: real(self, source, slot, nbytes, ()),
        "await_filled": lambda self, fetch: 0.0,
    }
    monkeypatch.setattr(SimulatedCarrier, fault, faults[fault])
    with pytest.raises(AssertionError):
        for seed in range(600):
            one_schedule(seed)


@pytest.mark.parametrize(
    ("seconds", "depth", "count"),
    [(1e-5, 1, 8), (5e-7, 1, 8), (2e-6, 1, 9), (1e-6, 2, 9), (3e-6, 3, 6)],
)
def test_a_pass_takes_the_time_that_is_predicted(seconds: float, depth: int, count: int) -> None:
    carrier = SimulatedCarrier(None, rate=1e9)
    model = Model(count, carrier, seconds)
    with offload(model, device=carrier, depth=depth) as handle:
        steps = [Step(seconds, unit.nbytes / 1e9) for unit in handle.plan.units]
        for _ in range(2):
            began = carrier.synchronize()
            model([])
            took = carrier.synchronize() - began
            assert took == pytest.approx(predict(steps, depth).pass_s)


def test_slots_keep_their_addresses() -> None:
    carrier = SimulatedCarrier(None)
    model = Model(7, carrier)
    addresses: list[list[int]] = []

    def note(module: nn.Module, *_: object) -> None:
        addresses[-1].append(module.weight.data_ptr())

    with offload(model, device=carrier, depth=2):
        for block in model.blocks:
            block.register_forward_pre_hook(note)
        for _ in range(3):
            addresses.append([])
            model([])
    assert addresses[0] == addresses[1] == addresses[2]
    assert len(set(addresses[0])) == 3


def test_peak_of_weights() -> None:
    carrier = SimulatedCarrier(3)
    model = Model(20, carrier)
    with offload(model, device=carrier, depth=2) as handle:
        for _ in range(3):
            model([])
        assert carrier.slots_bytes == 3 * handle.plan.slot_bytes <= 3 * 2000
