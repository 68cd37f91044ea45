"""The carrier of accelerators over a fake device: orders, locked memory, times, several devices."""

from __future__ import annotations

import copy
import random
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import save_file
from torch import nn

from polyattn.errors import OffloadError
from polyattn.hooks import offload
from polyattn.hooks.layerwise_offload import meter
from polyattn.hooks.layerwise_offload.devices.host import Reader
from polyattn.hooks.layerwise_offload.devices.simulated import SimulatedCarrier
from polyattn.hooks.layerwise_offload.exact_memory import locked_bytes
from tests.hooks.layerwise_offload.fake_accelerator import (
    Event,
    Module,
    OverHostMemory,
    Runtime,
    fake,
    runtime,
)
from tests.hooks.layerwise_offload.small_models import frozen, inputs

__all__ = ["fake", "runtime"]

X = inputs()


def test_what_is_read_late_does_not_come_after_what_was_copied_since(
    fake: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some units in files, some in memory, and other orders than were foreseen."""
    real = Reader.read

    def slow(self: Reader, *given: Any) -> Any:
        time.sleep(0.01)
        return real(self, *given)

    monkeypatch.setattr(Reader, "read", slow)
    for seed in range(4):
        lot, model = random.Random(seed), frozen(blocks=5)
        reference = copy.deepcopy(model)
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        with offload(model, device=OverHostMemory(), weights=tmp_path, depth=1) as handle:
            for each in (model, reference):
                for index in (2, 4):
                    each.blocks[index].up.weight.data.mul_(1.1)
            model(X)
            assert {unit.tier for unit in handle.plan.units} == {"disk", "host"}
            for block in model.blocks:
                block.register_forward_pre_hook(lambda *_: time.sleep(0.02))
            for _ in range(6):
                model.order = reference.order = [lot.randrange(5) for _ in range(5)]
                assert torch.equal(model(X), reference(X))
        assert torch.equal(model(X), reference(X))


def test_memory_stays_until_the_device_is_done_with_it(fake: Module) -> None:
    carrier = OverHostMemory()
    slot = carrier.slot(100)
    Event.pending.add(0)
    carrier.retire(slot, None, [carrier.stream()])
    carrier.slot(100)
    assert [each[0] is slot for each in carrier._retired] == [True]
    Event.pending.clear()
    carrier.slot(100)
    assert carrier._retired == []
    carrier.close()


def test_times_are_known(fake: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "_SHORTEST", 0.0)  # copies as small as these are not drawn
    for where in ({}, {"disk": tmp_path}):
        model = frozen(blocks=8)
        with offload(model, None, OverHostMemory(), sample=X, **where) as handle:
            for _ in range(2):
                model(X)
            report = handle.report()
            assert handle.plan.streamed
            assert handle.plan.rates.keys() == {"disk" if where else "host"}
            assert handle.plan.pass_s is not None
            assert handle.plan.pass_s > 0
            assert report.copy_s > 0
            assert all(row.fetches for row in report.units)
            assert {"copy", "compute", "pass"} <= {event.what for event in report.events}


def test_the_simulated_device_says_when_it_stalls() -> None:
    carrier = SimulatedCarrier(None, rate=1e9)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).eval().requires_grad_(False)
    with offload(model, device=carrier, depth=1) as handle:
        for _ in range(2):
            model(torch.ones(1, 64))
        report = handle.report()
        assert handle.units
        copies = sum(row.copy_s for row in report.units)
        assert copies == pytest.approx(sum(row.fetches * row.nbytes for row in report.units) / 1e9)
        assert sum(row.stall_s for row in report.units) == pytest.approx(copies)  # nothing else
        assert report.pass_s == pytest.approx(copies / 2)


def test_host_memory_is_locked_exactly_and_unlocked(fake: Module, runtime: Runtime) -> None:
    model = frozen(blocks=8)
    with offload(model, device=OverHostMemory(locks_host=True)) as handle:
        weights = sum(unit.nbytes for unit in handle.plan.units)
        assert sum(runtime.locked.values()) == locked_bytes() == handle.report().locked_bytes
        assert weights <= locked_bytes() <= 1.01 * weights
        assert torch.equal(model(X), frozen(blocks=8)(X))
    assert runtime.locked == {}
    with offload(model, device=OverHostMemory(locks_host=True), pinned=False):
        assert runtime.locked == {}


def test_what_comes_from_files_needs_two_locked_blocks(
    fake: Module, runtime: Runtime, tmp_path: Path
) -> None:
    model = frozen(blocks=8)
    with offload(model, device=OverHostMemory(locks_host=True), disk=tmp_path) as handle:
        for _ in range(2):
            assert torch.equal(model(X), frozen(blocks=8)(X))
        largest = max(unit.nbytes for unit in handle.plan.units)
        assert 0 < runtime.peak <= 2 * largest
    assert runtime.locked == {}
    assert locked_bytes() == 0


def test_memory_that_cannot_be_locked_is_an_error(fake: Module, runtime: Runtime) -> None:
    model, runtime.most = frozen(), 300_000
    with pytest.raises(OffloadError, match="ulimit -l"):
        offload(model, device=OverHostMemory(locks_host=True))
    assert runtime.locked == {}
    assert torch.equal(model(X), frozen()(X))


class Half(nn.Module):
    def __init__(self, blocks: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def test_several_devices(fake: Module) -> None:
    """Each part of a model on a device of its own: no event of one is waited for on the other."""
    model, reference = frozen(blocks=8), frozen(blocks=8)
    halves = [Half(model.blocks[:4]), Half(model.blocks[4:])]
    theirs = [Half(reference.blocks[:4]), Half(reference.blocks[4:])]
    handles = [offload(half, device=OverHostMemory(n)) for n, half in enumerate(halves)]
    x = torch.randn(2, 64)
    for _ in range(3):
        assert torch.equal(halves[1](halves[0](x)), theirs[1](theirs[0](x)))
    for handle in handles:
        assert handle.report().passes == 3
        handle.detach()
    with pytest.raises(OffloadError, match="one of the 2 that are here"):
        OverHostMemory(2)


def test_changes_between_forward_and_backward_are_told_from_reads_on_the_host(fake: Module) -> None:
    model, theirs = frozen(), frozen()
    with offload(model, device=OverHostMemory(), depth=1) as handle, torch.no_grad():
        weight = model.blocks[2].up.weight
        assert {unit.tier for unit in handle.plan.units if unit.name in handle.units} == {"host"}

        def scope(how: str) -> Any:
            return handle.loaded("blocks.2") if how == "here" else handle.mutate_params_scope()

        for how in ("here", "away"):
            x, y = (X.clone().requires_grad_() for _ in range(2))
            with torch.enable_grad():
                loss, exact = model(x).sum(), theirs(y).sum()
            with scope(how):
                assert torch.equal(weight, theirs.blocks[2].up.weight)
            loss.backward()
            exact.backward()
            assert torch.equal(x.grad, y.grad)
            with torch.enable_grad():
                loss = model(x).sum()
            with scope(how):
                weight.mul_(2)
            with pytest.raises(OffloadError, match=r"blocks\.2.*changed after the forward"):
                loss.backward()
            theirs.blocks[2].up.weight.mul_(2)
