"""Doing something as soon as a module has been imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["OnImport"]


class OnImport(MetaPathFinder):
    """Calls `action` after `name` has been imported, once; `cancel` gives up waiting for that.

    >>> waiting = OnImport("this", lambda: print("read"))
    >>> waiting.cancel()
    """

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action
        sys.meta_path.insert(0, self)

    def cancel(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders do, with a loader that tells us when it is done."""
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Telling(spec.loader, self._done)
                return spec
        return None

    def _done(self) -> None:
        if self in sys.meta_path:
            self.cancel()
            self._action()


class _Telling(Loader):
    """A loader in whose place the module finds the one that it stands for."""

    def __init__(self, loader: Loader, done: Callable[[], None]) -> None:
        self._loader, self._told = loader, done

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._told()
