"""Every order in which a device may copy and compute: no wrong byte, and the time that was said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.bench.offload.schedules import SimulatedModel, wrong_in
from polyattn.hooks import offload
from polyattn.hooks.layerwise_offload.devices.simulated import SimulatedCarrier
from polyattn.hooks.layerwise_offload.predict import Step, predict


def test_no_schedule_reads_a_wrong_byte(tmp_path: Path) -> None:
    assert [found for seed in range(200) if (found := wrong_in(seed, tmp_path))] == []


def _fetch_at_once(self: Any, source: Any, slot: Any, nbytes: int, users: Any) -> Any:
    return FETCH(self, source, slot, nbytes, ())


FETCH = SimulatedCarrier.fetch
FAULTS = {
    "fetch": _fetch_at_once,  # before those are done that still read the slot
    "await_filled": lambda self, fetch: setattr(fetch, "awaited", True),
    "abandon": lambda self, fetch: None,  # what is read later than something else overwrites it
    "retire": lambda self, slot, fetch, users: None,  # memory goes that is copied into
    "finish": lambda self, fetch: None,  # weights are changed that are being copied
    "wait_for": lambda self, users: None,  # changes go home before they are computed
    "drain": lambda self: None,
}


RARE = {"retire": 305, "drain": 137, "finish": 110}
"""Faults that few schedules meet, each with the first one that does, which is tried first."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_order_is_found(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any one of what orders copies and computations the same schedules go wrong."""
    monkeypatch.setattr(SimulatedCarrier, fault, FAULTS[fault])
    assert any(wrong_in(seed, tmp_path) for seed in (RARE.get(fault, 0), *range(1000)))


@pytest.mark.parametrize(
    ("seconds", "depth", "count"),
    [(1e-5, 1, 8), (5e-7, 1, 8), (2e-6, 1, 9), (1e-6, 2, 9), (3e-6, 3, 6)],
)
def test_a_pass_takes_the_time_that_is_predicted(seconds: float, depth: int, count: int) -> None:
    carrier = SimulatedCarrier(None, rate=1e9)
    model = SimulatedModel(count, carrier, seconds)
    with offload(model, device=carrier, depth=depth) as handle:
        steps = [Step(seconds, unit.nbytes / 1e9) for unit in handle.plan.units]
        for _ in range(2):
            began = carrier.synchronize()
            model([])
            took = carrier.synchronize() - began
            assert took == pytest.approx(predict(steps, depth).pass_s)


def test_slots_keep_their_addresses() -> None:
    carrier = SimulatedCarrier(None)
    model = SimulatedModel(7, carrier)
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
    model = SimulatedModel(20, carrier)
    with offload(model, device=carrier, depth=2) as handle:
        for _ in range(3):
            model([])
        assert carrier.slots_bytes == 3 * handle.plan.slot_bytes <= 3 * 2000
