"""Offload on a real CUDA device: the same bits, within the plan's memory, in any order."""

from __future__ import annotations

import copy
import random
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import save_file
from torch import Tensor, nn

from polyattn.hooks import offload
from polyattn.hooks.layerwise_offload import OffloadPlan
from polyattn.hooks.layerwise_offload.exact_memory import locked_bytes
from tests.hooks.layerwise_offload.small_models import Block, frozen, inputs

pytestmark = pytest.mark.gpu

WIDTH, BLOCKS = 1024, 12


class Stack(nn.Module):
    """Blocks of 16 MB each."""

    def __init__(self, blocks: int = BLOCKS, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.order = list(range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


def stack(seed: int = 3, **options: Any) -> Stack:
    torch.manual_seed(seed)
    return Stack(**options).eval().requires_grad_(False)


def resident(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).cuda()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 64, WIDTH, generator=torch.Generator().manual_seed(7)).cuda()


def test_the_same_bits_and_everything_back(x: Tensor) -> None:
    model = stack()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    want = resident(model)(x)
    for depth in (1, 2):
        with offload(model, device="cuda", depth=depth) as handle:
            assert len(handle.units) == BLOCKS
            assert locked_bytes() > 0
            for _ in range(4):
                assert torch.equal(model(x), want)
            report = handle.report()
            assert report.copy_s > 0
            state = model.state_dict()
            assert all(torch.equal(state[name].cpu(), before[name]) for name in before)
    assert locked_bytes() == 0
    assert all(torch.equal(p.cpu(), before[name]) for name, p in model.state_dict().items())


def test_any_order_under_a_busy_device(x: Tensor) -> None:
    """What is computed lasts longer than a copy, or shorter, and nothing is fetched that comes."""
    lot, model = random.Random(1), stack()
    reference = resident(model)
    with offload(model, device="cuda", depth=1):
        for turn in range(20):
            model.order = reference.order = [lot.randrange(BLOCKS) for _ in range(BLOCKS)]
            if turn % 3 == 0:
                torch.cuda._sleep(lot.randrange(40_000_000))
            assert torch.equal(model(x), reference(x)), turn


def test_a_budget_is_kept_and_its_plan_comes_true(x: Tensor) -> None:
    model = stack()
    want = resident(model)(x)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    budget = torch.cuda.memory_allocated() + (110 << 20)
    with offload(model, budget, "cuda", sample=x) as handle:
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            assert torch.equal(model(x), want)
        peak = torch.cuda.max_memory_allocated()
        plan: OffloadPlan = handle.plan
        assert plan.streamed
        assert plan.resident
        assert peak <= budget
        assert peak <= 1.02 * plan.peak_bytes
        assert plan.slowdown is not None


def test_what_fits_is_left_alone(x: Tensor) -> None:
    model = resident(stack())
    with offload(model, "40GiB", "cuda") as handle:
        assert handle.plan.streamed == ()
        model(x)


def test_weights_come_from_their_own_files(x: Tensor, tmp_path: Path) -> None:
    model = stack()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    want = resident(model)(x)
    with torch.device("meta"):
        empty = Stack().eval().requires_grad_(False)
    with offload(empty, device="cuda", weights=tmp_path, depth=1) as handle:
        assert {unit.tier for unit in handle.plan.units} == {"disk"}
        lot = random.Random(2)
        for _ in range(3):
            assert torch.equal(empty(x), want)
        reference = resident(model)
        for _ in range(4):
            empty.order = reference.order = [lot.randrange(BLOCKS) for _ in range(BLOCKS)]
            assert torch.equal(empty(x), reference(x))


def test_changes_are_written_back(x: Tensor) -> None:
    model = stack()
    reference = resident(model)
    with offload(model, device="cuda") as handle, torch.no_grad():
        for each in (2, 7):
            with handle.loaded(f"blocks.{each}"):
                model.blocks[each].up.weight.mul_(1.5)
            reference.blocks[each].up.weight.mul_(1.5)
            assert torch.equal(model(x), reference(x))
    assert torch.equal(model.blocks[7].up.weight.cpu(), reference.blocks[7].up.weight.cpu())


def test_gradients_of_adapters(x: Tensor) -> None:
    def adapted(model: Stack) -> Stack:
        for block in model.blocks:
            block.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
            nn.init.eye_(block.adapter.weight)
            block.register_forward_hook(lambda m, _, out: m.adapter(out))
        return model

    model = adapted(stack())
    reference = resident(model)
    reference(x).square().mean().backward()
    with offload(model, device="cuda", depth=1):
        for _ in range(2):
            model.zero_grad()
            model(x).square().mean().backward()
        for mine, theirs in zip(model.blocks, reference.blocks, strict=True):
            assert torch.equal(mine.adapter.weight.grad, theirs.adapter.weight.grad)


def test_threads_on_streams_of_their_own(x: Tensor) -> None:
    model = stack()
    reference = resident(model)
    given = [x * (index + 1) for index in range(4)]
    want = [reference(each) for each in given]
    torch.cuda.synchronize()
    wrong: list[object] = []

    def work(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                for _ in range(5):
                    out = model(given[index])
                    torch.cuda.current_stream().synchronize()
                    if not torch.equal(out, want[index]):
                        wrong.append(index)
        except Exception as error:
            wrong.append(error)

    with offload(model, device="cuda", depth=2):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_compiled_blocks(x: Tensor) -> None:
    model = stack(blocks=4)
    for block in model.blocks:
        block.compile()
    reference = resident(stack(blocks=4))
    with offload(model, device="cuda"), torch.no_grad():
        for _ in range(3):
            assert torch.allclose(model(x), reference(x), rtol=1e-4, atol=1e-4)


def test_the_small_model_of_the_other_tests() -> None:
    model = frozen()
    want = resident(model)(inputs().cuda())
    with offload(model, device="cuda"):
        assert torch.equal(model(inputs().cuda()), want)


def test_memory_that_is_not_locked(x: Tensor) -> None:
    model = stack()
    want = resident(model)(x)
    with offload(model, device="cuda", pinned=False):
        assert locked_bytes() == 0
        for _ in range(3):
            assert torch.equal(model(x), want)
