"""Adapters train beside weights that stream; weights that are trained themselves are refused."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.autograd import forward_ad

from polyattn.errors import OffloadError
from polyattn.hooks import offload
from tests.hooks.layerwise_offload.small_models import D, Model, frozen, inputs

X = inputs()


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.base = base
        self.a = nn.Linear(D, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def with_adapters(model: Model) -> Model:
    for block in model.blocks:
        block.up = Lora(block.up)
    return model.train()


def same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    for (name, p), (_, q) in pairs:
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_adapters_train(tmp_path: Path, recomputed: bool, depth: int) -> None:
    ours, theirs = with_adapters(frozen()), with_adapters(frozen())
    ours.recomputed = theirs.recomputed = recomputed
    with offload(ours, device="cpu", disk=tmp_path, depth=depth) as handle:
        optimizers = [
            torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
            for m in (ours, theirs)
        ]
        for _ in range(3):
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad()
                model(X).square().mean().backward()
            same_gradients(ours, theirs)
            for optimizer in optimizers:
                optimizer.step()
        assert handle.report().slots_added == 0
    assert torch.equal(ours(X), theirs(X))


def test_backward_fetches_in_reverse(tmp_path: Path) -> None:
    model = with_adapters(frozen())
    with offload(model, device="cpu", disk=tmp_path) as handle:
        for _ in range(3):
            model(X).sum().backward()
        misses = sum(row.misses for row in handle.report().units)
        assert misses <= 3  # one a backward pass at the most: where it turns round


def test_adapters_added_and_merged_while_offloaded(tmp_path: Path) -> None:
    ours, theirs = frozen(), frozen()
    with offload(ours, device="cpu", disk=tmp_path):
        ours(X)
        for model in (ours, theirs):
            with_adapters(model)
        assert torch.equal(ours(X), theirs(X))
        for model in (ours, theirs):
            model(X).square().sum().backward()
        same_gradients(ours, theirs)
        for model in (ours, theirs):
            for block in model.blocks:
                lora = block.up
                lora.base.weight.data += lora.b.weight @ lora.a.weight
                block.up = lora.base
        assert torch.equal(ours(X), theirs(X))
    assert torch.equal(ours(X), theirs(X))


def test_gradients_of_inputs(tmp_path: Path) -> None:
    ours, theirs = frozen(), frozen()
    found = []
    with offload(ours, device="cpu", disk=tmp_path) as handle:
        for model in (ours, theirs):
            x = X.clone().requires_grad_()
            model(x).sum().backward()
            found.append(x.grad)
        assert handle.report().slots_added == handle.report().slots_given_up == 0
    assert torch.equal(*found)


def test_backward_passes_of_threads(tmp_path: Path) -> None:
    model, wrong = frozen(), []
    x = X.clone().requires_grad_()
    (want,) = torch.autograd.grad(model(x).sum(), x)

    def work() -> None:
        for _ in range(10):
            x = X.clone().requires_grad_()
            (found,) = torch.autograd.grad(model(x).sum(), x)
            if not torch.equal(found, want):
                wrong.append(found)

    with offload(model, device="cpu", disk=tmp_path):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_backward_after_detaching_is_an_error(tmp_path: Path) -> None:
    model, x = frozen(), X.clone().requires_grad_()
    with offload(model, device="cpu", disk=tmp_path):
        loss = model(x).sum()
    with pytest.raises(OffloadError, match=r"blocks\.5 after detach\(\)"):
        loss.backward()


def test_what_was_changed_between_forward_and_backward_is_an_error(tmp_path: Path) -> None:
    model = frozen()
    with offload(model, device="cpu", disk=tmp_path) as handle:
        x = X.clone().requires_grad_()
        out = model(x)
        with handle.loaded("blocks.2"):
            model.blocks[2].up.weight.data.mul_(2)
        with pytest.raises(OffloadError, match=r"blocks\.2.*changed after the forward"):
            out.sum().backward()


def test_what_was_only_read_between_forward_and_backward_is_no_change(tmp_path: Path) -> None:
    model, theirs = frozen(), frozen()
    with offload(model, device="cpu", disk=tmp_path) as handle:
        x, y = (X.clone().requires_grad_() for _ in range(2))
        out = model(x)
        with handle.loaded():
            assert torch.equal(model.blocks[2].up.weight, theirs.blocks[2].up.weight)
        with handle.mutate_params_scope():
            assert torch.equal(model.blocks[3].up.weight, theirs.blocks[3].up.weight)
        out.sum().backward()
    theirs(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("how", ["here", "away", "uncounted away"])
def test_a_change_between_forward_and_backward_is_seen_however_it_is_made(
    how: str, tmp_path: Path
) -> None:
    model = frozen()
    with offload(model, device="cpu", disk=tmp_path) as handle, torch.no_grad():
        weight = model.blocks[2].up.weight
        with torch.enable_grad():
            loss = model(X.clone().requires_grad_()).sum()
        if how == "here":
            with handle.loaded("blocks.2"):
                weight.mul_(2)
        elif how == "away":
            with handle.mutate_params_scope():
                weight.mul_(2)
        else:
            weight.data.mul_(2)
        with pytest.raises(OffloadError, match=r"blocks\.2.*changed after the forward"):
            loss.backward()


class Counted(nn.Module):
    """Frozen, but counts its calls and keeps running statistics, as norms of batches do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.up(x))


def test_buffers_that_forward_changes_are_no_changed_weights(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*(Counted() for _ in range(4))).requires_grad_(False)
    theirs = copy.deepcopy(model)
    with offload(model, device="cpu", disk=tmp_path):
        found = []
        for each in (model, theirs):
            for _ in range(2):
                x = X.clone().requires_grad_()
                each(x).square().sum().backward()
                found.append(x.grad)
        assert torch.equal(found[0], found[2])
        assert torch.equal(found[1], found[3])
    assert all(map(torch.equal, model.buffers(), theirs.buffers()))


def test_training_the_weights_themselves_is_refused(tmp_path: Path) -> None:
    model = frozen().requires_grad_(True).train()
    with pytest.raises(OffloadError, match="training mode"):
        offload(model, device="cpu", disk=tmp_path)
    assert list(tmp_path.iterdir()) == []
    model.eval()
    with offload(model, device="cpu", disk=tmp_path):
        out = model(X)  # without no_grad, as many call a model that they only use
        with pytest.raises(OffloadError, match="gradient of blocks"):
            out.sum().backward()
        assert torch.equal(model(X), out)
    model(X).sum().backward()
    assert model.blocks[0].up.weight.grad is not None


def test_a_model_in_training_mode_may_be_used_without_gradients(tmp_path: Path) -> None:
    model = frozen().requires_grad_(True).train()
    with torch.no_grad():
        want = model(X)
        with offload(model, device="cpu", disk=tmp_path):
            assert torch.equal(model(X), want)
            with torch.enable_grad(), pytest.raises(OffloadError, match="gradient of blocks"):
                model(X).sum().backward()


def forward_gradient(model: nn.Module) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, X))).tangent


OTHER = {name: value * 0.5 for name, value in frozen().state_dict().items()}
BOTH = {name: torch.stack([value, OTHER[name]]) for name, value in frozen().state_dict().items()}

TRANSFORMS = {
    "jacrev": lambda m: torch.func.jacrev(m)(X[0, 0]),
    "jvp": lambda m: torch.func.jvp(m, (X[0, 0],), (X[0, 1],))[1],
    "hessian": lambda m: torch.func.hessian(lambda x: m(x).sum())(X[0, 0]),
    "vmap": lambda m: torch.vmap(m)(X),
    "grad": lambda m: torch.func.grad(lambda x: m(x).sum())(X),
    "forward AD": forward_gradient,
    "functional_call": lambda m: torch.func.functional_call(m, OTHER, (X,)),
    "ensemble": lambda m: torch.vmap(lambda p: torch.func.functional_call(m, p, (X,)))(BOTH),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_functions(transform: str, tmp_path: Path) -> None:
    model, reference = frozen(), frozen()
    with offload(model, device="cpu", disk=tmp_path) as handle:
        for _ in range(2):
            assert torch.equal(TRANSFORMS[transform](model), TRANSFORMS[transform](reference))
        assert torch.equal(model(X), reference(X))
        with torch.no_grad():
            assert torch.equal(torch.vmap(model)(X), torch.vmap(reference)(X))
        assert all(row.uses for row in handle.report().units)
    assert torch.equal(model(X), reference(X))
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
