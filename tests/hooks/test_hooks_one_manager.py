"""A module has one manager, however it is asked for: ``ModuleHookManager(m)`` or ``.of(m)``."""

import copy
import gc
import pickle
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.errors import HookError
from polyattn.hooks import ForwardHook, ModuleHookManager
from polyattn.hooks.manager import _managers


class Add(ForwardHook):
    """Adds to what comes out."""

    def __init__(self, number: int = 1) -> None:
        self.number = number

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output + self.number


ZERO = torch.zeros(1)


def test_what_one_attaches_the_other_sees_and_detaches() -> None:
    module = nn.Identity()
    made = ModuleHookManager(module)
    made.attach("x", Add())
    found = ModuleHookManager.of(module)
    assert found is made and found.names == ("x",) and module(ZERO) == 1
    found.detach_all()
    assert made.names == () and module(ZERO) == 0
    found.attach("y", Add())
    assert ModuleHookManager(module).names == ("y",)  # asking again starts nothing anew
    ModuleHookManager(module).detach("y")
    assert module(ZERO) == 0 and not module._forward_hooks


def test_a_second_name_is_refused_whoever_attached_the_first() -> None:
    module = nn.Identity()
    ModuleHookManager(module).attach("x", Add())
    with pytest.raises(HookError, match="second hook called 'x'"):
        ModuleHookManager(module).attach("x", Add())
    assert module(ZERO) == 1


@pytest.mark.parametrize("way", [ModuleHookManager, ModuleHookManager.of])
def test_neither_takes_what_is_no_module(way: object) -> None:
    with pytest.raises(HookError, match=r"got int, expected a torch\.nn\.Module"):
        way(3)  # type: ignore[operator]
    with pytest.raises(HookError, match="scripted"):
        way(torch.jit.script(nn.Linear(2, 2)))  # type: ignore[operator]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_its_own(way: object) -> None:
    module = nn.Linear(1, 1)
    ModuleHookManager(module).attach("x", Add())
    copied = way(module)  # type: ignore[operator]
    own = ModuleHookManager(copied)
    assert own is ModuleHookManager.of(copied) and own is not ModuleHookManager(module)
    assert own.names == () and own.module is copied
    assert copied(ZERO) == module(ZERO) - 1
    own.attach("x", Add(5))
    assert ModuleHookManager(module).get("x").number == 1  # type: ignore[union-attr]
    assert copied(ZERO) == module(ZERO) + 4


def test_a_copied_manager_holds_no_hooks() -> None:
    module = nn.Identity()
    manager = ModuleHookManager(module)
    manager.attach("x", Add())
    for copied in (copy.deepcopy(manager), pickle.loads(pickle.dumps(manager))):
        assert not isinstance(copied, ModuleHookManager)
    assert ModuleHookManager(module) is manager and module(ZERO) == 1


def attached_by_threads(module: nn.Module, count: int) -> set[int]:
    """Have threads ask for the module's manager at once; returns which objects they got."""
    together, found = threading.Barrier(count), []

    def ask(number: int) -> None:
        together.wait()
        manager = ModuleHookManager(module) if number % 2 else ModuleHookManager.of(module)
        manager.attach(str(number), Add())
        found.append(id(manager))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == count
    return set(found)


def test_threads_get_the_same_one() -> None:
    for _ in range(20):
        module = nn.Identity()
        assert attached_by_threads(module, 8) == {id(ModuleHookManager(module))}
        assert sorted(ModuleHookManager(module).names) == [str(number) for number in range(8)]
        assert module(ZERO) == 8


def test_nothing_stays_of_a_module_that_dies() -> None:
    module = nn.Identity()
    manager = ModuleHookManager(module)
    hook = Add()
    manager.attach("x", hook)
    key, seen = id(module), [weakref.ref(module), weakref.ref(hook)]
    assert key in _managers
    del module, hook
    gc.collect()
    assert seen[0]() is None  # also while the manager is kept
    with pytest.raises(HookError, match="no longer exists"):
        manager.module  # noqa: B018
    del manager
    gc.collect()
    assert seen[1]() is None and key not in _managers


def test_a_manager_that_is_kept_is_not_that_of_a_new_module_at_its_place() -> None:
    kept = []
    for _ in range(200):  # ids are used again
        module = nn.Identity()
        manager = ModuleHookManager(module)
        assert manager.module is module and manager.names == ()
        manager.attach("x", Add())
        kept.append(manager)
        del module
