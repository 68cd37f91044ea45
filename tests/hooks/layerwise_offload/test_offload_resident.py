"""An offloaded model gives the same bits, whatever is done with it, and looks resident."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from polyattn.errors import OffloadError
from polyattn.hooks import (
    LayerwiseOffloadHook,
    LayerwiseOffloadManager,
    LayerwiseOffloadState,
    ModuleHookManager,
    enable_layerwise_offload,
    offload,
)
from polyattn.hooks.layerwise_offload import between_calls
from polyattn.hooks.layerwise_offload.attach import Attached
from tests.hooks.layerwise_offload.small_models import Block, Model, frozen, inputs

X = inputs()


@pytest.fixture
def model() -> Model:
    return frozen()


@pytest.fixture
def reference() -> Model:
    return frozen()


def away(model: nn.Module, folder: Path, **given: object):
    return offload(model, device="cpu", disk=folder, **given)


@pytest.mark.parametrize(
    "order",
    [[0, 1, 2, 3, 4, 5], [0, 2, 4], [5, 4, 3, 2, 1, 0], [1, 1, 1, 2, 2], [0], [], [3, 1, 4, 1, 5]],
)
@pytest.mark.parametrize("depth", [1, 3])
def test_any_order(
    model: Model, reference: Model, tmp_path: Path, order: list[int], depth: int
) -> None:
    with away(model, tmp_path, depth=depth) as handle:
        for use in (range(6), order, order, range(6)):
            model.order = reference.order = list(use)
            assert torch.equal(model(X), reference(X))
        assert handle.report().slots_added == 0


def test_a_block_that_fails_is_called_again(model: Model, reference: Model, tmp_path: Path) -> None:
    with away(model, tmp_path) as handle:
        for block in model.blocks:
            block.fails = True
            with pytest.raises(ValueError, match="a block fails"):
                model(X)
            block.fails = False
            assert torch.equal(model(X), reference(X))
        assert handle.report().slots_added == handle.report().slots_given_up == 0


def test_it_looks_resident(model: Model, tmp_path: Path) -> None:
    objects = [id(p) for p in model.parameters()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with away(model, tmp_path):
        model(X)
        assert [id(p) for p in model.parameters()] == objects
        for name, value in model.state_dict().items():
            assert torch.equal(value, values[name])
            assert value.stride() == values[name].stride()
    assert [id(p) for p in model.parameters()] == objects
    assert all(torch.equal(model.state_dict()[name], values[name]) for name in values)


def test_detaching_leaves_nothing(model: Model, tmp_path: Path) -> None:
    before = {id(part): set(vars(part)) for part in model.modules()}
    handle = away(model, tmp_path)
    hook = ModuleHookManager.of(model.blocks[0]).get("layerwise_offload")
    assert isinstance(hook, LayerwiseOffloadHook)
    model(X)
    handle.detach()
    handle.detach()
    assert {id(part): set(vars(part)) for part in model.modules()} == before
    assert list(tmp_path.iterdir()) == []
    assert not handle.attached


def test_copies_and_files_have_the_values(model: Model, reference: Model, tmp_path: Path) -> None:
    want = reference(X)
    with away(model, tmp_path):
        model(X)
        assert torch.equal(copy.deepcopy(model)(X), want)
        for what in (model, model.state_dict()):
            file = io.BytesIO()
            torch.save(what, file)
            size = sum(p.numel() * 4 for p in model.parameters())
            assert file.tell() < 1.2 * size + 20_000
            file.seek(0)
            found = torch.load(file, weights_only=False)
            if isinstance(found, dict):
                fresh = frozen(seed=2)
                fresh.load_state_dict(found)
                found = fresh
            assert torch.equal(found(X), want)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_state_dict(model: Model, tmp_path: Path, assign: bool) -> None:
    other = frozen(seed=3)
    handle = away(model, tmp_path)
    model(X)
    model.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(model(X), other(X))
    handle.detach()
    assert torch.equal(model(X), other(X))


def test_changes_at_home_are_seen(model: Model, reference: Model, tmp_path: Path) -> None:
    """However they are made: torch counts some of them only."""
    changes = (
        lambda p: p.data.add_(0.5),
        lambda p: p.mul_(2.0),
        lambda p: p.numpy().__setitem__(0, 1.0),
        lambda p: setattr(p, "data", p.data.flip(0).clone()),
    )
    with away(model, tmp_path), torch.no_grad():
        for change in changes:
            for block in (0, 3, 5):
                change(model.blocks[block].up.weight)
                change(reference.blocks[block].up.weight)
            assert torch.equal(model(X), reference(X))
            assert torch.equal(model(X), reference(X))


def test_changes_in_a_scope_go_home(model: Model, reference: Model, tmp_path: Path) -> None:
    with away(model, tmp_path) as handle:
        with handle.loaded("blocks.1"):
            model.blocks[1].up.bias.data.mul_(2)
        with handle.mutate_params_scope():
            model.blocks[4].up.bias.data.mul_(3)
        reference.blocks[1].up.bias.data.mul_(2)
        reference.blocks[4].up.bias.data.mul_(3)
        assert torch.equal(model(X), reference(X))
        unknown = pytest.raises(OffloadError, match="expected one of those")
        with unknown, handle.loaded("blocks.9"):
            pass
    assert torch.equal(model(X), reference(X))


def test_changing_weights_loads_none_and_keeps_no_slots(
    model: Model, reference: Model, tmp_path: Path
) -> None:
    with away(model, tmp_path) as handle:
        model(X)
        engine = ModuleHookManager.of(model.blocks[0]).get("layerwise_offload").engine
        with handle.mutate_params_scope():
            assert len(engine.slots) == 2
            for each in (model, reference):
                for parameter in each.parameters():
                    parameter.data *= 1.5
        assert all(unit.home.is_changed() is False for unit in engine.units.values())
        assert torch.equal(model(X), reference(X))
        with handle.loaded():
            assert len(engine.slots) == 6
        assert len(engine.slots) == 2
        for each, scope in ((reference, None), (model, True)):
            for block in each.blocks:
                hook = ModuleHookManager.of(block).get("layerwise_offload") if scope else None
                with hook.mutate_params_scope() if hook else contextlib.nullcontext():
                    block.up.weight.data *= 0.5
        assert len(engine.slots) == 2
        assert torch.equal(model(X), reference(X))


def test_casting(model: Model, reference: Model, tmp_path: Path) -> None:
    with away(model, tmp_path):
        model.double()
        assert torch.equal(model(X.double()), reference.double()(X.double()))
        model.to("cpu", torch.float32)
        assert torch.equal(model(X), reference.float()(X))


@pytest.mark.parametrize("drop", [lambda m: m.to("meta"), lambda m: m.to_empty(device="meta")])
def test_moves_to_the_meta_device_leave_weights_where_they_stream_from(
    drop: Callable[[Model], object], model: Model, reference: Model, tmp_path: Path
) -> None:
    """As a program drops a model's memory; they cannot be brought back from there."""
    with away(model, tmp_path) as handle:
        drop(model)
        assert not any(p.is_meta for p in model.blocks.parameters())
        assert model.first.weight.is_meta, "what does not stream goes, as to any device"
        assert torch.equal(model.blocks[2](X), reference.blocks[2](X))
        assert len(handle.units) == 6


def test_blocks_that_are_used_by_themselves(model: Model, reference: Model, tmp_path: Path) -> None:
    x = inputs(4)
    with away(model, tmp_path) as handle:
        for ours, theirs in zip(model.blocks, reference.blocks, strict=True):
            assert torch.equal(ours(x), theirs(x))
            assert torch.equal(ours.up.weight @ x[0, 0], theirs.up.weight @ x[0, 0])
        assert handle.report().outside == 6


def test_views_of_weights_that_somebody_keeps(
    model: Model, reference: Model, tmp_path: Path
) -> None:
    kept = []
    with away(model, tmp_path):
        for block in model.blocks:
            block.register_forward_hook(lambda module, _, out: kept.append(module.up.weight[:2]))
        for _ in range(2):
            assert torch.equal(model(X), reference(X))
    for index, view in enumerate(kept):
        assert torch.equal(view, reference.blocks[index % 6].up.weight[:2])


def test_threads(model: Model, reference: Model, tmp_path: Path) -> None:
    want, wrong = reference(X), []

    def run() -> None:
        for _ in range(10):
            if not torch.equal(model(X), want):
                wrong.append(1)

    with away(model, tmp_path):
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_attached_and_detached_while_threads_are_in_calls(
    model: Model, reference: Model, tmp_path: Path
) -> None:
    x = inputs()
    with torch.no_grad():
        want = reference(x)
    wrong: list[object] = []
    over = threading.Event()

    def run() -> None:
        try:
            with torch.no_grad():
                while not over.is_set():
                    if not torch.equal(model(x), want):
                        wrong.append("another result")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            with offload(model, device="cpu", disk=tmp_path), torch.no_grad():
                assert torch.equal(model(x), want)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_weights_are_put_away_between_calls(
    model: Model, reference: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that goes on ends before, one that comes meanwhile begins afterwards."""
    x, put_away, results = inputs(), Attached._put_away, []
    times: list[tuple[str, float]] = []
    begun = threading.Event()

    def noted(self: Attached, *given: Any) -> None:
        times.append(("put away", time.monotonic()))
        put_away(self, *given)

    def slowly(module: Any, args: Any) -> None:
        begun.set()
        time.sleep(0.02)

    def run() -> None:
        with torch.no_grad():
            for _ in range(2):
                times.append(("begins", time.monotonic()))
                results.append(model(x))
                times.append(("ends", time.monotonic()))

    monkeypatch.setattr(Attached, "_put_away", noted)
    monkeypatch.setattr(between_calls, "QUIET_S", 2.0)  # a loaded machine is quiet now and then
    for block in model.blocks:
        block.register_forward_pre_hook(slowly)
    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(10)
    with offload(model, device="cpu", disk=tmp_path):
        thread.join()
    order = [what for what, _ in sorted(times, key=lambda entry: entry[1])]
    assert order.index("ends") < order.index("put away")
    assert order.count("ends") == 2
    assert order[-1] == "ends"
    with torch.no_grad():
        want = reference(x)
    assert all(torch.equal(out, want) for out in results)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_forked_child(model: Model, reference: Model, tmp_path: Path) -> None:
    if torch.get_num_threads() > 1:
        pytest.skip("OpenMP's threads do not survive a fork")
    want = reference(X)
    with away(model, tmp_path):
        model(X)
        child = os.fork()
        if child == 0:
            right = False
            try:
                right = torch.equal(model(X), want)
            finally:
                os._exit(0 if right else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(model(X), want)


def test_inference_mode(model: Model, reference: Model, tmp_path: Path) -> None:
    with away(model, tmp_path):
        for scope in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            with scope():
                assert torch.equal(model(X), reference(X))
        x = X.clone().requires_grad_()
        model(x).sum().backward()


@pytest.mark.slow
def test_compiled(model: Model, reference: Model, tmp_path: Path) -> None:
    with away(model, tmp_path):
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            assert torch.equal(compiled(X), reference(X))
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager", fullgraph=True)
    with away(model, tmp_path) as handle:
        assert len(handle.units) == 6
        for _ in range(2):
            assert torch.equal(model(X), reference(X))
    assert torch.equal(model(X), reference(X))


@pytest.mark.parametrize("first", ["compile", "offload"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_blocks_compiled_in_place(
    model: Model, reference: Model, tmp_path: Path, first: str, fullgraph: bool
) -> None:
    def compile_blocks() -> None:
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=fullgraph)

    if first == "compile":
        compile_blocks()
    with away(model, tmp_path) as handle:
        model(X)
        if first == "offload":
            compile_blocks()
        for _ in range(2):
            assert torch.equal(model(X), reference(X))
        assert torch.equal(copy.deepcopy(model)(X), reference(X))
        assert handle.report().units[5].misses <= 1
    assert torch.equal(model(X), reference(X))
    assert "AroundCompiled" not in {type(v).__name__ for v in vars(model.blocks[0]).values()}


def test_tied_weights_are_one(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in "abcd"})
    model["b"].weight = model["a"].weight
    model.eval().requires_grad_(False)
    want = [part(X) for part in model.values()]
    with away(model, tmp_path) as handle:
        assert handle.units == ("a", "c", "d")
        stored = sum(f.stat().st_size for f in tmp_path.glob("*.weights"))
        assert stored < 3 * 64 * 64 * 4 + 4 * 1024
        assert all(torch.equal(part(X), w) for part, w in zip(model.values(), want, strict=True))
        assert model["b"].weight is model["a"].weight


def test_values_that_torch_only_marks_as_negated_or_conjugate(tmp_path: Path) -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conjugate = nn.Parameter(torch.randn(64, 64, dtype=torch.cfloat).conj())
            self.negated = nn.Parameter(torch.randn(64, 64, dtype=torch.cfloat).conj().imag)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(torch.cfloat) @ self.conjugate).imag @ self.negated

    model = nn.Sequential(*(Marked() for _ in range(3))).requires_grad_(False)
    want = model(X)
    x, grads = X.clone().requires_grad_(), []
    grads += torch.autograd.grad(model(x).sum(), x)
    with away(model, tmp_path):
        assert torch.equal(model(X), want)
        grads += torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(model(X), want) and torch.equal(*grads)


def test_a_subclass_that_holds_more_than_tensors(tmp_path: Path) -> None:
    distributed = pytest.importorskip("torch.distributed.tensor")  # its tensors name their mesh
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).requires_grad_(False)
        for layer in model:
            for name, given in list(layer.named_parameters()):
                spread = distributed.distribute_tensor(given, mesh)
                setattr(layer, name, nn.Parameter(spread, requires_grad=False))
        x = distributed.distribute_tensor(X, mesh)
        want = model(x).full_tensor()
        with away(model, tmp_path) as handle:
            assert len(handle.units) == 3
            assert torch.equal(model(x).full_tensor(), want)
        assert torch.equal(model(x).full_tensor(), want)
    finally:
        torch.distributed.destroy_process_group()


def test_two_lists_and_nested_ones(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(*(Block() for _ in range(3)))
            self.inner = nn.Module()
            self.inner.decoder = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.encoder(x)
            for block in self.inner.decoder:
                x = block(x)
            return x

    model = Two().eval().requires_grad_(False)
    want = model(X)
    with away(model, tmp_path) as handle:
        assert handle.units == (
            "encoder.0", "encoder.1", "encoder.2", "inner.decoder.0", "inner.decoder.1",
        )  # fmt: skip
        assert torch.equal(model(X), want)


def test_experts_are_brought_when_they_are_called(tmp_path: Path) -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(64, 64)
            self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
            self.chosen = [1]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.gate(x)
            return sum(self.experts[index](x) for index in self.chosen)

    model = nn.Sequential(Mixture(), Mixture()).eval().requires_grad_(False)
    with away(model, tmp_path) as handle:
        assert "0.experts.3" in handle.units
        for chosen in ([1], [3, 0], [2], [1]):
            model[0].chosen = chosen
            model(X)
        rows = {row.name: row.uses for row in handle.report().units}
        assert rows["0.experts.1"] == 2
        assert rows["0.experts.2"] == 1
    fresh = copy.deepcopy(model)
    assert torch.equal(fresh(X), model(X))


@pytest.mark.parametrize("order", ["abacb", "cbbaa", "aabc"])
def test_a_module_in_several_places_is_one(order: str, tmp_path: Path) -> None:
    blocks = {name: Block() for name in "abc"}
    model = nn.Sequential(*(blocks[name] for name in order)).eval().requires_grad_(False)
    reference, x = copy.deepcopy(model), torch.randn(2, 3, 64)
    with away(model, tmp_path) as handle:
        assert len(handle.units) == len(set(order))
        for _ in range(2):
            assert torch.equal(model(x), reference(x))
    assert torch.equal(model(x), reference(x))


def test_a_list_with_two_names_is_one(model: Model, reference: Model, tmp_path: Path) -> None:
    model.alias = model.blocks
    with away(model, tmp_path) as handle:
        assert handle.units == tuple(f"blocks.{index}" for index in range(6))
        assert torch.equal(model(X), reference(X))


class Remembers(nn.Module):
    """Keeps what it has seen in a buffer of 2 MiB, past torch's count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("cache", torch.zeros(8192, 64))
        self.register_buffer("codes", torch.ones(1 << 20, dtype=torch.int8))  # as packed weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) + self.cache[:5].sum() + self.codes[:3].sum()
        self.cache.data[:5] += x[0]
        return x


def test_state_in_buffers_is_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Remembers() for _ in range(4))).eval().requires_grad_(False)
    reference = copy.deepcopy(model)
    with away(model, tmp_path) as handle:
        assert all(1 << 20 < unit.nbytes < 2 << 20 for unit in handle.plan.units)
        for _ in range(3):
            assert torch.equal(model(X), reference(X))
    assert torch.equal(model[1].cache, reference[1].cache)


@pytest.mark.parametrize("how", ["export", "strict export", "fake tensors"])
def test_a_call_without_values_is_an_error(
    how: str, model: Model, reference: Model, tmp_path: Path
) -> None:
    def call() -> object:
        if how == "fake tensors":
            with FakeTensorMode(allow_non_fake_inputs=True):
                return model(X)
        return torch.export.export(model, (X,), strict=how == "strict export")

    with away(model, tmp_path):
        with pytest.raises(Exception, match=r"handle\.detach|skip|Unsupported|graph break"):
            call()
        assert torch.equal(model(X), reference(X))
    assert torch.equal(torch.export.export(model, (X,)).module()(X), reference(X))


@pytest.mark.parametrize("where", ["in a block", "in a scope"])
def test_detaching_in_the_middle(
    model: Model, reference: Model, tmp_path: Path, where: str
) -> None:
    handle = away(model, tmp_path)
    if where == "in a block":
        model.blocks[2].up.register_forward_hook(lambda *given: handle.detach())
        assert torch.equal(model(X), reference(X))
    else:
        with handle.loaded("blocks.2"):
            handle.detach()
            model.blocks[2].up.weight.data.mul_(2)
            reference.blocks[2].up.weight.mul_(2)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(model(X), reference(X))


def test_enabling_twice_is_one(model: Model, tmp_path: Path) -> None:
    handle = away(model, tmp_path)
    assert away(model, tmp_path) is handle
    assert enable_layerwise_offload(model) is handle
    with pytest.raises(OffloadError, match="another offload of polyattn"):
        away(model.blocks, tmp_path)
    handle.detach()
    assert isinstance(handle, LayerwiseOffloadManager)
    assert LayerwiseOffloadState.__name__ == "Engine"


def test_a_model_that_is_dropped_goes(tmp_path: Path) -> None:
    model = frozen()
    handle = away(model, tmp_path)
    model(X)
    gone = weakref.ref(model)
    del model, handle
    gc.collect()
    assert gone() is None
    assert list(tmp_path.iterdir()) == []
