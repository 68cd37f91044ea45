"""Beside accelerate's and diffusers' hooks, which replace ``forward``, on the same module."""

import itertools
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.hooks import ForwardHook, ModuleHookManager
from tests.hooks.recording import Recorder, Scale, Shift, calls, state_of

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Ours:
    """Attaches one hook that triples the output and one that adds one to the input."""

    def __init__(self, module: nn.Module) -> None:
        self.manager = ModuleHookManager.of(module)

    def on(self) -> None:
        self.manager.attach("scale", Scale(3.0))
        self.manager.attach("shift", Shift())

    def off(self) -> None:
        self.manager.detach_all()


class Accelerate:
    """accelerate's ModelHook that adds ten to the output."""

    def __init__(self, module: nn.Module) -> None:
        self.hooks = pytest.importorskip("accelerate.hooks")
        self.module = module

        class Add(self.hooks.ModelHook):
            def post_forward(self, module, output):
                return output + 10

        self.hook = Add()

    def on(self) -> None:
        self.hooks.add_hook_to_module(self.module, self.hook)

    def off(self) -> None:
        self.hooks.remove_hook_from_module(self.module)


class Diffusers:
    """diffusers' ModelHook that subtracts five from the output."""

    def __init__(self, module: nn.Module) -> None:
        hooks = pytest.importorskip("diffusers.hooks.hooks")

        class Subtract(hooks.ModelHook):
            def post_forward(self, module, output):
                return output - 5

        self.hook = Subtract()
        self.registry = hooks.HookRegistry.check_if_exists_or_initialize(module)

    def on(self) -> None:
        self.registry.register_hook(self.hook, "subtract")

    def off(self) -> None:
        self.registry.remove_hook("subtract")


EFFECT: dict[type, tuple[Callable, Callable]] = {
    Ours: (lambda x: x + 1, lambda y: y * 3),
    Accelerate: (lambda x: x, lambda y: y + 10),
    Diffusers: (lambda x: x, lambda y: y - 5),
}


def expected(module: nn.Module, on: set[type]) -> torch.Tensor:
    """Replaced forwards are inside torch's hooks, whatever the order of attachment."""
    y = EFFECT[Ours][0](X) if Ours in on else X
    y = nn.functional.linear(y, module.weight, module.bias)
    for kind in (Accelerate, Diffusers, Ours):
        y = EFFECT[kind][1](y) if kind in on else y
    return y


def check(module: nn.Module, on: set[type]) -> None:
    torch.testing.assert_close(module(X), expected(module, on))


@pytest.mark.parametrize("other", [Accelerate, Diffusers])
@pytest.mark.parametrize("order", list(itertools.product([0, 1], [0, 1])))
def test_any_order_of_attach_and_detach(other: type, order: tuple[int, int]) -> None:
    module = nn.Linear(3, 3)
    pair = [Ours(module), other(module)]
    on: set[type] = set()
    for first in order:  # twice over, so that what one leaves is there for the next
        for part in (pair[first], pair[1 - first]):
            part.on()
            on.add(type(part))
            check(module, on)
        for part in (pair[order[1]], pair[1 - order[1]]):
            part.off()
            on.remove(type(part))
            check(module, on)


@pytest.mark.parametrize("attach", list(itertools.permutations([Ours, Accelerate, Diffusers])))
@pytest.mark.parametrize("ours_off_at", [0, 1, 2])
def test_all_three(attach: tuple[type, ...], ours_off_at: int) -> None:
    """The other two must leave in reverse, for each restores the forward that it found."""
    module = nn.Linear(3, 3)
    parts = {kind: kind(module) for kind in attach}
    on: set[type] = set()
    for kind in attach:
        parts[kind].on()
        on.add(kind)
        check(module, on)
    leave = [kind for kind in reversed(attach) if kind is not Ours]
    leave.insert(ours_off_at, Ours)
    for kind in leave:
        parts[kind].off()
        on.remove(kind)
        check(module, on)


@pytest.mark.parametrize("other", [Accelerate, Diffusers])
def test_ours_leave_the_others_as_they_were(other: type) -> None:
    module = nn.Linear(3, 3)
    other(module).on()
    before = state_of(module)
    ours = Ours(module)
    ours.on()
    ours.off()
    assert state_of(module) == before


@pytest.mark.parametrize("other", [Accelerate, Diffusers])
def test_failure_in_their_hook_is_told_to_ours(other: type) -> None:
    seen: list = []
    module = nn.Linear(3, 3)
    part = other(module)
    part.hook.pre_forward = lambda *args, **kwargs: 1 / 0
    part.on()
    with ModuleHookManager.of(module) as manager:
        manager.attach("A", Recorder("A", seen))
        with pytest.raises(ZeroDivisionError):
            module(X)
    assert calls(seen) == ["pre A", "failed A"]


@pytest.mark.parametrize("ours_first", [True, False])
def test_accelerate_offload_to_the_host(ours_first: bool) -> None:
    """A real hook: the weights are on the meta device outside the call."""
    accelerate = pytest.importorskip("accelerate")

    class Devices(ForwardHook):
        def __init__(self):
            self.seen = []

        def post_forward(self, module, output):
            self.seen.append(module.weight.device.type)

    module, hook = nn.Linear(3, 3), Devices()
    plain = module(X)
    manager = ModuleHookManager.of(module)
    if ours_first:
        manager.attach("devices", hook)
    accelerate.cpu_offload(module, execution_device="cpu")
    if not ours_first:
        manager.attach("devices", hook)
    torch.testing.assert_close(module(X), plain)
    assert hook.seen == ["meta"]  # torch's hooks run around theirs: after it the weights are gone
    manager.detach_all()
    accelerate.hooks.remove_hook_from_module(module)
    torch.testing.assert_close(module(X), plain)


@pytest.mark.parametrize("other", [Accelerate, Diffusers])
def test_compiled_together(other: type) -> None:
    torch.compiler.reset()
    module = nn.Linear(3, 3)
    model = nn.Sequential(nn.Sequential(module), nn.Identity())
    part, ours = other(module), Ours(module)
    run = torch.compile(lambda x: model(x) * 1, backend="eager")
    with torch.no_grad():
        run(X)
        for ours_first in (True, False):
            first, second = (ours, part) if ours_first else (part, ours)
            first.on()
            torch.testing.assert_close(run(X), expected(module, {type(first)}))
            second.on()
            torch.testing.assert_close(run(X), expected(module, {type(first), type(second)}))
            first.off()
            torch.testing.assert_close(run(X), expected(module, {type(second)}))
            second.off()
            torch.testing.assert_close(run(X), expected(module, set()))
    torch.compiler.reset()
