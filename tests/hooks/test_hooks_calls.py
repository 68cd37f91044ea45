"""Calls that fail, change their hooks, recurse, share modules or run side by side."""

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.hooks import ForwardHook, ModuleHookManager
from tests.hooks.recording import Recorder, Scale, calls, state_of

X = torch.ones(2, 3)


class Boom(Exception):
    pass


class Raises(Recorder):
    """Raises at one event."""

    def __init__(self, name: str, seen: list, at: str) -> None:
        super().__init__(name, seen)
        self.at = at

    def pre_forward(self, module, *args, **kwargs):
        super().pre_forward(module, *args, **kwargs)
        if self.at == "pre":
            raise Boom
        return args, kwargs

    def post_forward(self, module, output):
        super().post_forward(module, output)
        if self.at == "post":
            raise Boom
        return output

    def failed(self, module, exc):
        super().failed(module, exc)
        if self.at == "failed":
            raise ZeroDivisionError("in failed")


class Fails(nn.Module):
    def forward(self, x):
        raise Boom


def attach_three(module: nn.Module, middle: ForwardHook, seen: list) -> ModuleHookManager:
    manager = ModuleHookManager.of(module)
    manager.attach("A", Recorder("A", seen))
    manager.attach("B", middle)
    manager.attach("C", Recorder("C", seen))
    return manager


def boom(*args):
    raise Boom


@pytest.mark.parametrize(
    ("at", "fails", "expected"),
    [
        ("", True, "pre A,pre B,pre C,failed C,failed B,failed A"),
        ("pre", False, "pre A,pre B,failed A"),
        ("post", False, "pre A,pre B,pre C,post C,post B,failed B,failed A"),
        ("failed", True, "pre A,pre B,pre C,failed C,failed B,failed A"),
    ],
)
def test_who_hears_of_a_failure(at: str, fails: bool, expected: str) -> None:
    seen: list = []
    module = Fails() if fails else nn.Identity()
    before = state_of(module)
    manager = attach_three(module, Raises("B", seen, at), seen)
    for _ in range(2):
        seen.clear()
        with pytest.raises(Boom) as caught:
            module(X)
        assert calls(seen) == expected.split(",")
        assert all(event[2] is caught.value for event in seen if event[0] == "failed")
        notes = getattr(caught.value, "__notes__", [])
        said = "Raises.failed raised ZeroDivisionError('in failed') on hearing of this"
        assert notes == ([said] if at == "failed" else [])
    assert not manager._running
    manager.detach_all()
    assert state_of(module) == before


@pytest.mark.parametrize(
    ("register", "first", "expected"),
    [
        ("register_forward_pre_hook", True, ""),
        ("register_forward_pre_hook", False, "pre A,failed A"),
        ("register_forward_hook", True, "pre A,failed A"),
        ("register_forward_hook", False, "pre A,post A"),
    ],
)
@pytest.mark.parametrize("handling", [False, True])
def test_failure_of_a_foreign_hook(
    register: str, first: bool, expected: str, handling: bool
) -> None:
    seen: list = []
    module = nn.Identity()
    if first:
        getattr(module, register)(boom)
    manager = ModuleHookManager.of(module)
    manager.attach("A", Recorder("A", seen))
    if not first:
        getattr(module, register)(boom)
    try:
        if handling:  # an exception that is being handled outside is not the call's
            raise KeyError
        with pytest.raises(Boom):
            module(X)
    except KeyError:
        with pytest.raises(Boom):
            module(X)
    assert calls(seen) == (expected.split(",") if expected else [])
    assert not manager._running


def test_success_inside_an_exception_handler_is_success() -> None:
    seen: list = []
    module = nn.Identity()
    ModuleHookManager.of(module).attach("A", Recorder("A", seen))
    try:
        raise Boom
    except Boom:
        module(X)
    assert calls(seen) == ["pre A", "post A"]


def test_frame_of_an_outer_call_is_not_taken_for_the_failed_inner_one() -> None:
    """A foreign pre-hook raises in the inner call before ours ran; torch calls ours anyway."""

    class Recursive(nn.Module):
        def forward(self, x, depth=2):
            if depth:
                try:
                    self(x, depth - 1)
                except Boom:
                    return x
            return x

    def foreign(module, args):
        if len(args) == 2 and args[1] == 1:
            raise Boom

    seen: list = []
    module = Recursive()
    module.register_forward_pre_hook(foreign)
    manager = ModuleHookManager.of(module)
    manager.attach("A", Recorder("A", seen))
    module(X)
    assert calls(seen) == ["pre A", "post A"]
    assert not manager._running


def test_recursion_and_failure_at_the_bottom() -> None:
    class Recursive(nn.Module):
        def forward(self, x, depth):
            if depth == 0:
                raise Boom
            try:
                return self(x, depth - 1)
            except Boom:
                if depth == 1:
                    raise
                return x

    class Depths(ForwardHook):
        def __init__(self):
            self.stack, self.seen = [], []

        def pre_forward(self, module, x, depth):
            self.stack.append(depth)
            return (x, depth), {}

        def post_forward(self, module, output):
            self.seen.append(("post", self.stack.pop()))

        def failed(self, module, exc):
            self.seen.append(("failed", self.stack.pop()))

    module, hook = Recursive(), Depths()
    ModuleHookManager.of(module).attach("depths", hook)
    module(X, 4)
    assert hook.seen == [("failed", 0), ("failed", 1), ("post", 2), ("post", 3), ("post", 4)]


def test_shared_module_has_one_manager_and_runs_per_use() -> None:
    shared, seen = nn.Linear(3, 3), []
    model = nn.Sequential()
    model.add_module("one", shared)
    model.add_module("two", shared)
    assert ModuleHookManager.of(model.one) is ModuleHookManager.of(model.two)
    ModuleHookManager.of(shared).attach("A", Recorder("A", seen))
    model(X)
    assert calls(seen) == ["pre A", "post A"] * 2


@pytest.mark.parametrize("at", ["pre_forward", "post_forward", "failed", "forward"])
def test_changes_inside_a_call_begin_with_the_next(at: str) -> None:
    seen: list = []

    def change():
        manager.detach_all()
        manager.attach("late", Recorder("late", seen))

    class Changes(Recorder):
        def pre_forward(self, module, *args, **kwargs):
            if at == "pre_forward":
                change()
            return super().pre_forward(module, *args, **kwargs)

        def post_forward(self, module, output):
            if at == "post_forward":
                change()
            return super().post_forward(module, output)

        def failed(self, module, exc):
            if at == "failed":
                change()
            super().failed(module, exc)

    class Body(nn.Module):
        def forward(self, x):
            if at == "forward" and "late" not in manager:
                change()
            if at == "failed":
                raise Boom
            return x

    module = Body()
    before, manager = state_of(module), ModuleHookManager.of(module)
    attach_three(module, Changes("B", seen), seen)
    for expected in (
        ["pre A", "pre B", "pre C", "end C", "end B", "end A"],
        ["pre late", "end late"],
    ):
        seen.clear()
        try:
            module(X)
        except Boom:
            assert at == "failed"
        end = "failed" if at == "failed" else "post"
        assert calls(seen) == [entry.replace("end", end) for entry in expected]
    manager.detach_all()
    assert state_of(module) == before


@pytest.mark.parametrize("at", ["pre", "forward", "post", "failed"])
@pytest.mark.parametrize("foreign", [False, True])
def test_last_hook_detached_inside_its_call_is_finished_and_leaves_nothing(
    at: str, foreign: bool
) -> None:
    class Once(Recorder):
        def pre_forward(self, module, *args, **kwargs):
            if at == "pre":
                handle.detach()
            return super().pre_forward(module, *args, **kwargs)

        def post_forward(self, module, output):
            if at == "post":
                handle.detach()
            return super().post_forward(module, output)

        def failed(self, module, exc):
            if at == "failed":
                handle.detach()
            super().failed(module, exc)

    class Body(nn.Module):
        def forward(self, x):
            if at == "forward":
                handle.detach()
            if at == "failed" and seen:
                raise Boom
            return x

    seen: list = []
    module = Body()
    before, manager = state_of(module), ModuleHookManager.of(module)
    handle = manager.attach("once", Once("once", seen))
    if foreign:  # stands behind ours in the table over which torch runs in a failed call
        other = module.register_forward_hook(lambda *a: None, always_call=True)
    try:
        module(X)
    except Boom:
        assert at == "failed"
    assert calls(seen) == ["pre once", "failed once" if at == "failed" else "post once"]
    if foreign:
        if at == "failed":  # it could not leave at once; the next call or change sees to it
            assert len(module._forward_hooks) == 2
            seen.clear()
            module(X)
        assert len(module._forward_hooks) == 1
        other.remove()
    assert state_of(module) == before


def test_interrupt_in_a_hook_is_told_at_once() -> None:
    class Stops(ForwardHook):
        def post_forward(self, module, output):
            raise KeyboardInterrupt

    seen: list = []
    module = nn.Identity()
    manager = attach_three(module, Stops(), seen)
    with pytest.raises(KeyboardInterrupt):
        module(X)
    assert calls(seen) == ["pre A", "pre C", "post C", "failed A"]
    assert not manager._running


def test_no_grad_and_jit_trace() -> None:
    module = nn.Linear(3, 3)
    ModuleHookManager.of(module).attach("scale", Scale(2.0))
    with torch.no_grad():
        expected = module(X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(module, X)
    assert traced(X).equal(expected)
    assert not expected.requires_grad and module(X).requires_grad
