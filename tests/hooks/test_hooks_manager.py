"""Names, order, refusals, handles, scopes; and that nothing stays behind."""

import gc
import subprocess
import sys
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.errors import PolyattnError
from polyattn.hooks import ForwardHook, HookError, ModuleHookManager
from tests.hooks.recording import Recorder, Scale, Shift, calls, state_of

X = torch.arange(4.0).reshape(1, 4)


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def test_pre_in_order_post_in_reverse(module: nn.Module) -> None:
    seen: list = []
    manager = ModuleHookManager.of(module)
    for name in "ABC":
        manager.attach(name, Recorder(name, seen))
    module(X)
    assert calls(seen) == ["pre A", "pre B", "pre C", "post C", "post B", "post A"]
    assert manager.names == ("A", "B", "C") == tuple(manager)
    assert "B" in manager and "D" not in manager
    assert manager.get("B").name == "B" and manager.get("D") is None
    assert repr(manager) == "<ModuleHookManager of Linear: A, B, C>"


def test_positions(module: nn.Module) -> None:
    manager = ModuleHookManager.of(module)
    manager.attach("b", ForwardHook())
    manager.attach("a", ForwardHook(), before="b")
    manager.attach("c", ForwardHook(), after="a")
    assert manager.names == ("a", "c", "b")


def test_hooks_change_arguments_and_output() -> None:
    class Rename(ForwardHook):
        def pre_forward(self, module, *args, **kwargs):
            return (), {"input": args[0] * kwargs.pop("times")}

    module = nn.Identity()
    module.forward = lambda input: input
    with ModuleHookManager.of(module) as manager:
        manager.attach("rename", Rename())
        manager.attach("scale", Scale(2))
        assert module(X, times=3).equal(X * 6)


def test_none_means_unchanged(module: nn.Module) -> None:
    class Silent(ForwardHook):
        def pre_forward(self, module, *args, **kwargs):
            return None

        def post_forward(self, module, output):
            return None

    expected = module(X)
    ModuleHookManager.of(module).attach("silent", Silent())
    assert module(X).equal(expected)


def test_methods_set_on_the_hook_itself_are_called(module: nn.Module) -> None:
    hook, seen = ForwardHook(), []
    hook.post_forward = lambda module, output: seen.append(output)
    ModuleHookManager.of(module).attach("hook", hook)
    assert module(X) is seen[0]


@pytest.mark.parametrize(
    "result", [5, X, (X, {}), [(X,), {}], ((X,), {}, 1), ([X], {}), ((X,), None)]
)
def test_wrong_result_of_pre_forward_names_the_hook(module: nn.Module, result: object) -> None:
    class Wrong(ForwardHook):
        def pre_forward(self, module, *args, **kwargs):
            return result

    with ModuleHookManager.of(module) as manager:
        manager.attach("wrong", Wrong())
        with pytest.raises(HookError, match=r"Wrong\.pre_forward, expected \(args, kwargs\)"):
            module(X)


def test_refusals_change_nothing(module: nn.Module) -> None:
    seen: list = []
    manager = ModuleHookManager.of(module)
    manager.attach("scale", Scale(2))
    late = Recorder("late", seen)
    for arguments, options, words in [
        (("scale", late), {}, "a second hook called 'scale'.*detach that one first"),
        (("", late), {}, "got '' as a hook's name"),
        (("x", late), {"before": "scael"}, "Did you mean 'scale'"),
        (("x", late), {"before": "scale", "after": "scale"}, "leave one out"),
        (("x", Recorder), {}, "the class Recorder as a hook"),
        (("x", lambda *a: None), {}, "expected an instance of a subclass of ForwardHook"),
    ]:
        with pytest.raises(HookError, match=words):
            manager.attach(*arguments, **options)
    assert manager.names == ("scale",) and seen == []
    with pytest.raises(PolyattnError, match=r"expected a torch\.nn\.Module"):
        ModuleHookManager.of(module.forward)


def test_scripted_modules_are_refused(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(module)
    with pytest.raises(HookError, match="attach them to the module it was made from"):
        ModuleHookManager.of(scripted)


def test_of_gives_the_same_manager_while_it_matters(module: nn.Module) -> None:
    manager = ModuleHookManager.of(module)
    assert ModuleHookManager.of(module) is manager
    manager.attach("scale", Scale(2))
    number = id(manager)
    del manager
    gc.collect()
    assert id(ModuleHookManager.of(module)) == number
    assert ModuleHookManager.of(module).names == ("scale",)
    assert ModuleHookManager.of(nn.Linear(4, 4)).names == ()


def test_module_is_exactly_as_before(module: nn.Module) -> None:
    foreign = module.register_forward_hook(lambda module, args, output: None)
    before, output = state_of(module), module(X)
    manager = ModuleHookManager.of(module)
    assert state_of(module) == before
    for name in "ABC":
        manager.attach(name, Recorder(name, []))
    assert set(vars(module)) == set(before) and "forward" not in vars(module)
    module(X)
    manager.detach("B")
    manager.detach_all()
    assert state_of(module) == before and module(X).equal(output)
    manager.detach_all()
    assert manager.detach("A") is None
    foreign.remove()


def test_handle_takes_off_only_its_own_hook_and_only_once(module: nn.Module) -> None:
    seen: list = []
    manager = ModuleHookManager.of(module)
    first = manager.attach("name", Recorder("first", seen))
    assert first.attached and repr(first) == "<HookHandle 'name', on>"
    assert manager.detach("name").name == "first"
    assert not first.attached
    second = manager.attach("name", Recorder("second", seen))
    first.detach()
    assert second.attached and manager.names == ("name",)
    second.detach()
    second.detach()
    attached = [("attach", "first"), ("detach", "first"), ("attach", "second")]
    assert seen == [*attached, ("detach", "second")]
    with manager.attach("name", Scale(2)) as handle:
        assert handle.attached
    assert manager.names == ()


def test_scopes_detach_what_was_attached_inside(module: nn.Module) -> None:
    manager = ModuleHookManager.of(module)
    manager.attach("outer", Scale(2))
    with pytest.raises(KeyError), manager:
        manager.attach("middle", Scale(2))
        with manager as same:
            assert same is manager
            manager.attach("inner", Scale(2), before="outer")
        assert manager.names == ("outer", "middle")
        raise KeyError
    assert manager.names == ("outer",)


def test_hook_that_refuses_to_be_attached_is_not(module: nn.Module) -> None:
    class Refuses(ForwardHook):
        def on_attach(self, module):
            raise ZeroDivisionError

    before = state_of(module)
    with pytest.raises(ZeroDivisionError):
        ModuleHookManager.of(module).attach("refuses", Refuses())
    assert state_of(module) == before


def test_hook_that_complains_on_detach_is_off_and_so_are_the_others(module: nn.Module) -> None:
    class Complains(ForwardHook):
        def on_detach(self, module):
            raise ZeroDivisionError

    seen: list = []
    before, manager = state_of(module), ModuleHookManager.of(module)
    for name in ("a", "b"):
        manager.attach(name, Recorder(name, seen))
        manager.attach(name * 2, Complains())
    with pytest.raises(ZeroDivisionError):
        manager.detach_all()
    assert state_of(module) == before
    assert seen[2:] == [("detach", "b"), ("detach", "a")]


def test_hooks_keep_neither_module_nor_manager_alive() -> None:
    module = nn.Linear(2, 2)
    manager = ModuleHookManager.of(module)
    manager.attach("scale", Scale(2))
    held = weakref.ref(module)
    gc.disable()  # so that it must happen without the collector's help
    try:
        del module
        assert held() is None
    finally:
        gc.enable()
    with pytest.raises(HookError, match="no longer exists"):
        manager.attach("other", Scale(2))
    manager.detach_all()
    assert manager.names == ()
    assert repr(manager) == "<ModuleHookManager of a module that is gone: no hooks>"


def test_hook_that_holds_its_module_is_collected() -> None:
    class Holder(ForwardHook):
        def on_attach(self, module):
            self.module = module

    module = nn.Linear(2, 2)
    ModuleHookManager.of(module).attach("holder", Holder())
    held = weakref.ref(module)
    del module
    gc.collect()
    assert held() is None


def test_others_may_empty_the_tables(module: nn.Module) -> None:
    manager = ModuleHookManager.of(module)
    manager.attach("scale", Scale(2))
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()
    manager.attach("shift", Shift())
    plain = nn.functional.linear(X + 1, module.weight, module.bias)
    assert module(X).equal(plain * 2)
    manager.detach_all()
    assert not module._forward_hooks and not module._forward_pre_hooks
    assert not module._forward_hooks_always_called and not module._forward_pre_hooks_with_kwargs


def test_without_torch_the_message_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import polyattn.hooks"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingDependency: got an import of polyattn.hooks without PyTorch" in done.stderr
