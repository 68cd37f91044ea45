"""Random schedules on the simulated device: whatever order copies and computations take.

Units lie on the host, in files, or some here and some there; between passes they are changed in
place, replaced by larger ones, or changed on the device; passes skip, repeat, fail and write to
their weights, of one thread or of several, each with a stream of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyattn.bench.offload.turns import Turns
from polyattn.hooks.layerwise_offload import LayerwiseOffload, offload
from polyattn.hooks.layerwise_offload.devices.simulated import SimulatedCarrier

__all__ = ["SimulatedModel", "wrong_in"]


class _Block(nn.Module):
    """Its computation reads the weight later, at the address that it has when it is called."""

    def __init__(self, index: int, carrier: SimulatedCarrier, seconds: float) -> None:
        super().__init__()
        weight = torch.full((1000 + index % 3 * 500,), index, dtype=torch.uint8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.carrier, self.seconds, self.value = carrier, seconds, index
        self.fails = False
        self.writes: int | None = None  # what its own call sets the weight to, afterwards
        self.is_kept, self.kept = False, list[tuple[Tensor, int]]()  # views, and what they show
        self.turns: Turns | None = None

    def forward(self, seen: list[tuple[int, set[int]]]) -> list[tuple[int, set[int]]]:
        if self.turns is not None:
            self.turns.pass_on()
        if self.fails:
            raise ValueError("a block fails")
        address, size, want = self.weight.data_ptr(), self.weight.numel(), self.value
        self._launch(lambda: seen.append((want, set(ctypes.string_at(address, size)))), address)
        if self.is_kept:
            self.kept.append((self.weight.detach(), want))
        if self.writes is not None:
            self.set_to(self.writes)
            torch.autograd.graph.increment_version(self.weight)
        if self.turns is not None:
            self.turns.pass_on()
        return seen

    def set_to(self, value: int) -> None:
        """Set the weight, and whatever views of it somebody keeps, on the device."""
        self.kept.clear()
        address, size, self.value = self.weight.data_ptr(), self.weight.numel(), value
        self._launch(lambda: ctypes.memset(address, value, size), address)

    def _launch(self, work: Callable[[], Any], address: int) -> None:
        self.carrier.launch(work, self.seconds, touches=address)


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

    def forward(
        self, seen: list[tuple[int, set[int]]], order: Sequence[int] | None = None
    ) -> list[tuple[int, set[int]]]:
        for index in self.order if order is None else order:
            self.blocks[index](seen)
        return seen


def wrong_in(seed: int, folder: Path) -> str | None:
    """Run one schedule; return what was wrong, if anything. `folder`: for files of weights."""
    lot, carrier = random.Random(seed), SimulatedCarrier(seed)
    depth = lot.randint(1, 3)
    model = SimulatedModel(lot.randint(2 * depth + 2, 2 * depth + 5), carrier)
    where = lot.choice(({}, {}, {"disk": folder / "own"}, _stored(model, folder)))
    handle = offload(model, device=carrier, depth=depth, **where)
    seen: list[tuple[int, set[int]]] = []
    expected = 0
    for _ in range(lot.randint(1, 4)):
        expected += _passes_of(model, lot, carrier, seen)
        for _ in range(lot.choice((0, 1, 2, 4))):
            _change(model, handle, lot)
    carrier.synchronize()
    handle.detach()
    wrong = [f"read {have}, expected {want}" for want, have in seen if have != {want}]
    for block in model.members:
        views = [("kept", *each) for each in block.kept]
        for what, tensor, want in (*views, ("detached", block.weight, block.value)):
            if set(tensor.tolist()) != {want}:
                wrong.append(f"{what} {set(tensor.tolist())}, expected {want}")
    if len(seen) != expected:
        wrong.append(f"{len(seen)} blocks computed, expected {expected}")
    wrong += carrier.faults
    return f"seed {seed}: {'; '.join(wrong[:3])}" if wrong else None


def _stored(model: SimulatedModel, folder: Path) -> dict[str, Any]:
    """Return the place of the model's own file: what is changed then lies elsewhere."""
    from safetensors.torch import save_file

    path = folder / f"{len(model.blocks)}.safetensors"
    if not path.exists():
        save_file({name: value.clone() for name, value in model.state_dict().items()}, path)
    return {"weights": path}


def _passes_of(
    model: SimulatedModel, lot: random.Random, carrier: SimulatedCarrier,
    seen: list[tuple[int, set[int]]],
) -> int:  # fmt: skip
    """Call the model, by one thread or by some at once; return how many blocks must compute."""
    count = len(model.blocks)
    threads = lot.choice((1, 1, 1, 2, 3))
    orders = [
        [lot.randrange(count) for _ in range(lot.randint(0, 9))]
        if lot.random() < 0.5
        else list(range(count))
        for _ in range(threads)
    ]
    failing = lot.randrange(count) if lot.random() < 0.2 else None
    if failing is not None:
        model.members[failing].fails = True
    if threads == 1:
        extra = lot.choice(("", "", "writes", "keeps"))
        chosen = model.members[lot.randrange(count)]
        chosen.writes = lot.randrange(100, 160) if extra == "writes" else None
        chosen.is_kept = extra == "keeps"
        _call(model, seen, orders[0])
    else:
        _call_at_once(model, lot, carrier, seen, orders)
    for block in model.members:
        block.fails, block.writes, block.is_kept, block.turns = False, None, False, None
    return sum(order.index(failing) if failing in order else len(order) for order in orders)


def _call(model: SimulatedModel, seen: list[tuple[int, set[int]]], order: Sequence[int]) -> None:
    with contextlib.suppress(ValueError):
        model(seen, order)


def _call_at_once(
    model: SimulatedModel, lot: random.Random, carrier: SimulatedCarrier,
    seen: list[tuple[int, set[int]]], orders: Sequence[Sequence[int]],
) -> None:  # fmt: skip
    """Call it by threads that take turns by lot, within blocks too, so that a seed says all."""
    turns = Turns(lot, len(orders))

    def body(number: int) -> None:
        with turns.taken_by(number):
            carrier.use_stream(f"compute {number}", after=[carrier.stream()])
            _call(model, seen, orders[number])

    for block in model.members:
        block.turns = turns
    threads = [threading.Thread(target=body, args=(number,)) for number in range(len(orders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    carrier.use_stream(carrier.stream(), after=[f"compute {n}" for n in range(len(orders))])


def _change(model: SimulatedModel, handle: LayerwiseOffload, lot: random.Random) -> None:
    """Change a weight while it is away, or where it is computed with."""
    index = lot.randrange(len(model.blocks))
    block, value, name = model.members[index], lot.randrange(160, 250), f"blocks.{index}"
    how = lot.choice(("in place", "replaced", "replaced", "on the device"))
    if name not in handle.units:
        block.set_to(value)  # it stays on the device, where only computations change it
    elif how == "in place":
        block.weight.data.fill_(value)
        block.value = value
    elif how == "replaced":
        size = lot.choice((300, 1500, 2500, 9000))
        block.weight.data = torch.full((size,), value, dtype=torch.uint8)
        block.value = value
    else:
        with handle.loaded(name):
            block.set_to(value)
