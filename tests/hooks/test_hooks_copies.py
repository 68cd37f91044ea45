"""Copies of a module with hooks: deepcopy, pickle, replicas; state_dict; checkpointing."""

import copy
import io
import pickle
import threading

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.utils.checkpoint import checkpoint

from polyattn.hooks import ForwardHook, ModuleHookManager, recomputing
from tests.hooks.recording import Recorder, Scale, calls, state_of

X = torch.ones(2, 3)


class Unpicklable(Recorder):
    def __init__(self, name: str, seen: list) -> None:
        super().__init__(name, seen)
        self.lock = threading.Lock()


def saved_and_loaded(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("inside", [False, True])
def test_copy_has_its_own_weights_and_none_of_the_hooks(kind: str, inside: bool) -> None:
    seen: list = []
    block = nn.Linear(3, 3)
    module = nn.Sequential(block) if inside else block
    pristine = state_of(COPIES[kind](block))
    manager = ModuleHookManager.of(block)
    manager.attach("A", Unpicklable("A", seen))
    manager.attach("scale", Scale(2.0))
    other = COPIES[kind](module)
    copied = other[0] if inside else other
    seen.clear()
    with torch.no_grad():
        copied.weight.zero_()
        copied.bias.fill_(7)
    assert other(X).equal(torch.full((2, 3), 7.0))
    assert calls(seen) == []
    assert module(X).equal(nn.functional.linear(X, block.weight, block.bias) * 2)
    assert calls(seen) == ["pre A", "post A"]
    anew = ModuleHookManager.of(copied)
    assert anew is not manager and anew.names == ()
    assert {key: value for key, value in state_of(copied).items() if "hook" in key} == {
        key: value for key, value in pristine.items() if "hook" in key
    }
    anew.attach("scale", Scale(3.0))
    assert other(X).equal(torch.full((2, 3), 21.0))
    assert manager.names == ("A", "scale")
    manager.detach_all()
    assert other(X).equal(torch.full((2, 3), 21.0))


def test_copy_fails_as_a_plain_module_does_and_foreign_hooks_live_beside_the_inert() -> None:
    seen: list = []
    module = nn.Linear(3, 3)
    ModuleHookManager.of(module).attach("A", Recorder("A", seen))
    other = copy.deepcopy(module)
    other.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    assert other(X).equal(other.bias.expand(2, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        other(torch.ones(2, 5))
    assert calls(seen) == []


def test_copying_inside_a_call() -> None:
    class Copies(ForwardHook):
        def pre_forward(self, module, *args, **kwargs):
            self.copied = copy.deepcopy(module)

    module, hook = nn.Linear(3, 3), Copies()
    ModuleHookManager.of(module).attach("copies", hook)
    expected = module(X)
    first, hook.copied = hook.copied, None
    assert first(X).equal(expected) and hook.copied is None


def test_state_dict_knows_nothing_of_hooks() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = module.state_dict()
    for part in module.modules():
        ModuleHookManager.of(part).attach("scale", Scale(2.0))
    after = module.state_dict()
    assert list(after) == list(before) and after._metadata == before._metadata
    assert all(after[key].equal(before[key]) for key in before)
    module.load_state_dict(before)
    assert [name for name, _ in module.named_modules()] == ["", "0", "1"]


@pytest.mark.parametrize("make", ["replicate", "copy"])
def test_shallow_copies_share_the_hooks_which_are_told_the_copy(make: str) -> None:
    """As torch's own hooks: such a copy shares torch's tables. DataParallel runs it in a thread."""

    class Weights(ForwardHook):
        def __init__(self):
            self.seen = []

        def post_forward(self, module, output):
            self.seen.append((module, threading.get_ident()))
            return output

    module, hook = nn.Linear(3, 3), Weights()
    ModuleHookManager.of(module).attach("weights", hook)
    if make == "replicate":
        replica = module._replicate_for_data_parallel()
        replica.weight, replica.bias = module.weight * 2, module.bias * 2
    else:
        replica = copy.copy(module)
    outputs: list = []
    thread = threading.Thread(target=lambda: outputs.append(replica(X)))
    thread.start()
    thread.join()
    assert outputs[0].equal(nn.functional.linear(X, replica.weight, replica.bias))
    assert [entry[0] for entry in hook.seen] == [replica]
    module(X)
    assert hook.seen[-1][0] is module

    inner = ModuleHookManager.of(replica)
    assert inner is not ModuleHookManager.of(module) and inner.names == ()
    before = state_of(module)
    inner.attach("scale", Scale(2.0))  # does not push the original's out of the shared tables
    replica(X)
    assert hook.seen[-1][0] is replica
    inner.detach_all()
    assert state_of(module) == before


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("early_stop", [True, False])
def test_checkpointing(reentrant: bool, early_stop: bool) -> None:
    class Watch(Recorder):
        def pre_forward(self, module, *args, **kwargs):
            self.seen.append(("pre", self.name, recomputing()))
            return args, kwargs

        def post_forward(self, module, output):
            self.seen.append(("post", self.name, recomputing()))
            return output * 3

        def failed(self, module, exc):
            self.seen.append(("failed", self.name, recomputing()))

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    seen: list = []
    manager = ModuleHookManager.of(module)
    manager.attach("A", Watch("A", seen))
    x = X.clone().requires_grad_()
    module(x).sum().backward()
    expected, x.grad = [x.grad, *(p.grad for p in module.parameters())], None
    module.zero_grad()
    seen.clear()
    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        checkpoint(module, x, use_reentrant=reentrant).sum().backward()
    assert all(
        grad.equal(want)
        for grad, want in zip(
            [x.grad, *(p.grad for p in module.parameters())], expected, strict=True
        )
    )
    stopped = early_stop and not reentrant
    # The product after the module is the last to save a tensor, so early stopping falls in our
    # post_forward's output or not at all; either way the recomputation has one end.
    assert [event[2] for event in seen] == [False, False, True, True]
    assert [event[0] for event in seen[:3]] == ["pre", "post", "pre"]
    assert seen[3][0] in (("failed", "post") if stopped else ("post",))
    assert not manager._running and not recomputing()


def test_checkpointing_that_stops_early_inside_the_module_is_a_failure() -> None:
    class Body(nn.Module):
        def forward(self, x):
            y = x.exp()  # saves its result: the last tensor that the backward pass needs
            return y + 1

    seen: list = []
    module = Body()
    ModuleHookManager.of(module).attach("A", Recorder("A", seen))
    x = X.clone().requires_grad_()
    checkpoint(module, x, use_reentrant=False).sum().backward()
    assert calls(seen) == ["pre A", "post A", "pre A", "failed A"]
    assert x.grad.equal(X.exp())
