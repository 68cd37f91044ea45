"""The names that FastVideo's manager of hooks has, with what they do there."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.errors import HookError
from polyattn.hooks import ForwardHook, ModuleHookManager


class Noted(ForwardHook):
    """Notes when it is asked; says its own name, as FastVideo's hooks do."""

    def __init__(self, letter: str, log: list[str]) -> None:
        self.letter, self.log = letter, log

    def name(self) -> str:
        return f"noted {self.letter}"

    def on_attach(self, module: nn.Module) -> None:
        self.log.append(f"on {self.letter}")

    def on_detach(self, module: nn.Module) -> None:
        self.log.append(f"off {self.letter}")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.log.append(f"before {self.letter}")
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.log.append(f"after {self.letter}")
        return output


def test_hooks_are_appended_found_and_removed() -> None:
    module = nn.Linear(2, 2)
    log: list[str] = []
    assert ModuleHookManager.get_from(module) is None
    manager = ModuleHookManager.get_from_or_default(module)
    for letter in "AB":
        manager.append_forward_hook(Noted(letter, log))
    assert ModuleHookManager.get_from(module) is manager is ModuleHookManager.of(module)
    module(torch.zeros(1, 2))
    assert log == ["on A", "on B", "before A", "before B", "after B", "after A"]
    assert manager.get_forward_hook("noted A") is manager.forward_hooks["noted A"]
    assert manager.get_forward_hook("other") is None
    with pytest.raises(HookError, match="second hook called 'noted A'"):
        manager.append_forward_hook(Noted("A", log))
    manager.remove_forward_hook("noted A")
    assert log[-1] == "off A" and manager.names == ("noted B",)
    ModuleHookManager.remove_from_manager(module)
    assert log[-1] == "off B" and ModuleHookManager.get_from(module) is None


def test_a_hook_is_replaced_in_its_place() -> None:
    module = nn.Identity()
    log: list[str] = []
    manager = ModuleHookManager.get_from_or_default(module)
    for letter in "AB":
        manager.append_forward_hook(Noted(letter, log))
    log.clear()
    manager.replace_forward_hook("noted A", Noted("C", log))
    manager.replace_forward_hook("noted B", Noted("D", log), run_on_attach=False)
    assert log == ["off A", "on C", "on D"] and manager.names == ("noted A", "noted B")
    log.clear()
    module(torch.zeros(1))
    assert log == ["before C", "before D", "after D", "after C"]
    with pytest.raises(HookError, match="got 'noted E'"):
        manager.replace_forward_hook("noted E", Noted("E", log))
    with pytest.raises(ValueError, match="got 'x' as the hook to take off"):
        manager.remove_forward_hook("x")


def test_a_hook_without_a_name_goes_by_its_class() -> None:
    manager = ModuleHookManager.get_from_or_default(nn.Identity())
    with pytest.raises(HookError, match="no longer exists"):
        manager.append_forward_hook(ForwardHook())
    module = nn.Identity()
    manager = ModuleHookManager.get_from_or_default(module)
    manager.append_forward_hook(ForwardHook())
    assert manager.names == ("ForwardHook",)
