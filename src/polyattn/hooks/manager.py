"""Which hooks a module has: :class:`ModuleHookManager` attaches, orders and detaches them.

It uses torch's own hook tables, registers there once per module however many hooks there are, and
never replaces ``forward``; so it lives beside whatever does. With no hook attached the module is
exactly as it was.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from polyattn.errors import HookError, near_matches
from polyattn.forks import kept_free
from polyattn.hooks.compiled import forget_graphs_with, guard_on_hooks
from polyattn.hooks.dispatch import Dispatcher, Inert, Step
from polyattn.hooks.forward_hook import ForwardHook
from polyattn.torch.internals import hook_tables

__all__ = ["HookHandle", "ModuleHookManager"]


class HookHandle:
    """What ``attach`` returns: ``detach()`` takes off that hook, and may be called again."""

    def __init__(self, manager: ModuleHookManager, name: str, hook: ForwardHook) -> None:
        self.name = name
        self.hook = hook
        self._manager: ModuleHookManager | None = manager

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, {'on' if self.attached else 'off'}>"

    @property
    def attached(self) -> bool:
        """Whether this very attachment still stands; a later one of that name is another."""
        return self._manager is not None and self._manager._handle(self.name) is self

    def detach(self) -> None:
        """Detach the hook if it still is attached by this handle."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager._take_off(self)

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.detach()


class ModuleHookManager(Dispatcher):
    """The hooks of one module, by name and in order.

    A module has one manager: ``ModuleHookManager(module)`` and ``ModuleHookManager.of(module)``
    give it, the same object each time. Of a module that is a copy, or was loaded, asking also
    clears away what the copied hooks have left in it. Raises HookError for what is no module, or a
    scripted one.

    Changes take effect from the module's next call on, also those made inside a hook: a call that
    runs is finished with the hooks that it started with. Used as a context manager it detaches, at
    the end, what was attached inside.

    >>> import torch
    >>> from polyattn.hooks import ForwardHook, ModuleHookManager
    >>> class Add(ForwardHook):
    ...     def __init__(self, number):
    ...         self.number = number
    ...     def post_forward(self, module, output):
    ...         return output + self.number
    >>> class Triple(ForwardHook):
    ...     def post_forward(self, module, output):
    ...         return output * 3
    >>> module = torch.nn.Identity()
    >>> manager = ModuleHookManager.of(module)
    >>> handle = manager.attach("add", Add(1))
    >>> module(torch.zeros(1))
    tensor([1.])
    >>> _ = manager.attach("triple", Triple(), before="add")
    >>> module(torch.zeros(1))  # post_forward in reverse: add, then triple
    tensor([3.])
    >>> manager.names
    ('triple', 'add')
    >>> handle.detach()
    >>> manager.detach_all()
    >>> "add" in manager, module(torch.zeros(1))
    (False, tensor([0.]))
    """

    _module: weakref.ref[nn.Module]
    _attached: tuple[HookHandle, ...]
    _changing: threading.RLock
    _outer: list[tuple[HookHandle, ...]]

    def __new__(cls, module: nn.Module) -> Self:
        """Return the module's manager, a new one if it has none."""
        _check_module(module)
        # The module itself keeps the manager, by torch's tables, as long as anything is attached.
        with _finding:
            manager = _managers.get(id(module))
            if manager is None or manager._module() is not module:
                _clear_inert(module)
                manager = _managers[id(module)] = super().__new__(cls)
                manager._begin(module)
            return manager  # type: ignore[return-value]

    def __init__(self, module: nn.Module) -> None:
        """It has begun already, in `__new__`, and maybe long ago."""

    def _begin(self, module: nn.Module) -> None:
        super().__init__()
        self._module = weakref.ref(module)
        self._attached = ()
        self._changing = threading.RLock()
        self._outer = []

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Return the module's manager, as ``ModuleHookManager(module)`` does."""
        return cls(module)

    @property
    def module(self) -> nn.Module:
        """The module; an error once it is gone, for the manager does not keep it alive."""
        module = self._module()
        if module is None:
            raise HookError(
                "got a manager whose module no longer exists, expected one in use: "
                "keep the module as long as its hooks are to run"
            )
        return module

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the attached hooks in the order of ``pre_forward``."""
        return tuple(handle.name for handle in self._attached)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __repr__(self) -> str:
        module = self._module()
        kind = "a module that is gone" if module is None else type(module).__name__
        return f"<{type(self).__name__} of {kind}: {', '.join(self.names) or 'no hooks'}>"

    def get(self, name: str) -> ForwardHook | None:
        """Return the hook of that name, or None."""
        handle = self._handle(name)
        return None if handle is None else handle.hook

    def attach(
        self, name: str, hook: ForwardHook, *, before: str | None = None, after: str | None = None
    ) -> HookHandle:
        """Attach `hook` as the last, innermost one, or beside the one named `before` or `after`."""
        if not isinstance(hook, ForwardHook):
            what = f"the class {hook.__name__}" if isinstance(hook, type) else type(hook).__name__
            raise HookError(
                f"got {what} as a hook, expected an instance of a subclass of ForwardHook: "
                "derive from it and override what you need"
            )
        module, handle = self.module, HookHandle(self, name, hook)
        with self._changing:
            self._place(name, before, after)  # so that nothing happens if it must be refused
            hook.on_attach(module)
            place = self._place(name, before, after)
            self._change(module, (*self._attached[:place], handle, *self._attached[place:]))
        return handle

    def detach(self, name: str) -> ForwardHook | None:
        """Detach the hook of that name and return it; None if there is none."""
        handle = self._handle(name)
        if handle is None:
            return None
        handle.detach()
        return handle.hook

    def detach_all(self) -> None:
        """Detach every hook, last first."""
        self._detach(self._attached)

    # The names that FastVideo's manager has, whose hooks say their own names.

    @classmethod
    def get_from(cls, module: nn.Module) -> Self | None:
        """Return the module's manager if a hook is attached, else None (FastVideo's name)."""
        with _finding:
            manager = _managers.get(id(module))
        hooked = manager is not None and manager._attached and manager._module() is module
        return manager if hooked else None  # type: ignore[return-value]

    @classmethod
    def get_from_or_default(cls, module: nn.Module) -> Self:
        """Return the module's manager, as :meth:`of` does (FastVideo's name)."""
        return cls(module)

    @staticmethod
    def remove_from_manager(module: nn.Module) -> None:
        """Detach every hook of the module (FastVideo's name)."""
        ModuleHookManager(module).detach_all()

    @property
    def forward_hooks(self) -> dict[str, ForwardHook]:
        """The attached hooks by name, in order; a copy (FastVideo's name)."""
        return {handle.name: handle.hook for handle in self._attached}

    def get_forward_hook(self, hook_name: str) -> ForwardHook | None:
        """Return the hook of that name, or None, as :meth:`get` does (FastVideo's name)."""
        return self.get(hook_name)

    def append_forward_hook(self, hook: ForwardHook) -> None:
        """Attach `hook` last, by its own ``name()``, or by its class's (FastVideo's name)."""
        name = getattr(hook, "name", type(hook).__name__)
        self.attach(name() if callable(name) else name, hook)

    def replace_forward_hook(
        self, hook_name: str, new_hook: ForwardHook, run_on_attach: bool = True
    ) -> None:
        """Put `new_hook` in the place and name of another (FastVideo's name).

        With ``run_on_attach=False`` the other one's ``on_detach`` is not called.
        """
        with self._changing:
            place = self.names.index(self._known(hook_name).name)
            follows = self.names[place + 1] if place + 1 < len(self.names) else None
            self.remove_forward_hook(hook_name, run_on_attach)
            self.attach(hook_name, new_hook, before=follows)

    def remove_forward_hook(self, hook_name: str, run_detach: bool = True) -> None:
        """Detach the hook of that name; an error if there is none (FastVideo's name)."""
        with self._changing:
            self._take_off(self._known(hook_name), told=run_detach)

    def _known(self, name: str) -> HookHandle:
        handle = self._handle(name)
        if handle is None:
            raise HookError(
                f"got {name!r} as the hook to take off, expected one that is attached "
                f"({', '.join(self.names) or 'none is'}).{near_matches(name, self.names)}"
            )
        return handle

    def __enter__(self) -> ModuleHookManager:
        self._outer.append(self._attached)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        outer = self._outer.pop()
        self._detach(tuple(handle for handle in self._attached if handle not in outer))

    def _hooked(self) -> nn.Module | None:
        return self._module()

    def _handle(self, name: str) -> HookHandle | None:
        return next((handle for handle in self._attached if handle.name == name), None)

    def _place(self, name: str, before: str | None, after: str | None) -> int:
        """Where in the order a new hook goes; HookError if it cannot go there."""
        names = self.names
        if not isinstance(name, str) or not name:
            raise HookError(f"got {name!r} as a hook's name, expected a text that is not empty")
        if name in names:
            raise HookError(
                f"got a second hook called {name!r} for this {type(self.module).__name__}, "
                f"expected a new name (attached: {', '.join(names)}): "
                "detach that one first or choose another"
            )
        if before is not None and after is not None:
            raise HookError(
                f"got before={before!r} and after={after!r}, expected at most one: leave one out"
            )
        anchor = before if before is not None else after
        if anchor is None:
            return len(names)
        if anchor not in names:
            raise HookError(
                f"got {anchor!r} as the hook to stand next to, expected one that is attached "
                f"({', '.join(names) or 'none is'}).{near_matches(anchor, names)}"
            )
        return names.index(anchor) + (before is None)

    def _take_off(self, handle: HookHandle, told: bool = True) -> None:
        with self._changing:
            if handle not in self._attached:
                return
            module = self._module()
            rest = tuple(other for other in self._attached if other is not handle)
            self._change(module, rest)
            if module is not None and told:
                handle.hook.on_detach(module)

    def _detach(self, handles: tuple[HookHandle, ...]) -> None:
        """Detach all of them, last first, even if some complain; then raise the first complaint."""
        errors = []
        for handle in reversed(handles):
            try:
                handle.detach()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _change(self, module: nn.Module | None, attached: tuple[HookHandle, ...]) -> None:
        if module is not None:
            guard_on_hooks()
            self._publish(module, tuple(Step.of(handle.hook) for handle in attached))
        self._attached = attached
        if module is not None:
            forget_graphs_with(module)


_managers: weakref.WeakValueDictionary[int, ModuleHookManager] = weakref.WeakValueDictionary()
# a finalizer that runs meanwhile may ask for a manager too
_finding = kept_free(threading.RLock())


def _check_module(module: object) -> None:
    """Raise HookError for what can have no hooks."""
    if not isinstance(module, nn.Module):
        raise HookError(
            f"got {type(module).__name__}, expected a torch.nn.Module: "
            "hooks are attached to modules"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise HookError(
            f"got the scripted module {type(module).__name__}, expected one in Python, for "
            "TorchScript calls no hooks of ours: attach them to the module it was made from"
        )


def _clear_inert(module: nn.Module) -> None:
    """Take out of torch's tables what copying a module has left of its hooks."""
    for hooks, *flags in hook_tables(module):
        for key in [key for key, hook in hooks.items() if _is_inert(hook)]:
            for table in (hooks, *flags):
                table.pop(key, None)


def _is_inert(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), Inert)
