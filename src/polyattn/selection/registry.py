"""Backends by framework and name: those of this package, and those that other packages bring.

A name may serve several frameworks (`native_cpu` for torch and for JAX); requests say plain names,
and each call finds those of its own framework. Third parties register through the entry-point
group ``polyattn.backends`` (each entry names a :class:`Backend` or a function that returns one or
several) or by :meth:`Registry.register`. Nothing that they bring can end a program: what raises is
a reason.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from polyattn import settings
from polyattn.errors import PolyattnError, UnknownBackend
from polyattn.forks import kept_free
from polyattn.problem import Problem
from polyattn.problem.machine import Facts
from polyattn.selection import scopes
from polyattn.selection.backend import (
    FAULTS,
    FRAMEWORKS,
    Available,
    Backend,
    Key,
    Missing,
    Probe,
    answer,
    check_backend,
    told,
)
from polyattn.selection.spelling import spelt, unknown

__all__ = [
    "FRAMEWORKS", "IN_TREE", "Available", "Backend", "Missing", "Probe", "Registry", "register",
    "registry",
]  # fmt: skip

GROUP = "polyattn.backends"
IN_TREE = ("polyattn.backends.discovery",)
"""Modules that declare this package's backends; they import no framework."""


class Registry:
    """An ordered table of backends; probes are asked once and remembered.

    ``registry["flex"]`` is the backend of that name where only one framework has it,
    ``registry["jax", "native_cpu"]`` the one of that framework. `in_tree` names the modules that
    declare backends before any other is registered; `plugins`: whether entry points are loaded.
    """

    def __init__(self, in_tree: Sequence[str] = IN_TREE, plugins: bool = True) -> None:
        self._backends: dict[Key, Backend] = {}
        self._groups: dict[Key, tuple[str, ...]] = {}
        self._probed: dict[Key, Probe] = {}
        self.lock = threading.RLock()
        self._modules = tuple(in_tree)
        self._own: dict[Key, Backend] = {}
        self._declared, self._discovered = False, not plugins
        self.faults: dict[str, str] = {}  # entry points and configs that failed, and why

    def register(self, backend: Backend) -> Backend:
        """Add a backend; a name that its framework has already, or no name at all, is an error."""
        check_backend(backend)
        with self.lock:
            self._declare()  # first come, first served: this package's names are taken already
            if backend.key in self._backends or backend.key in self._groups:
                raise PolyattnError(
                    f"got a second backend called {backend.name!r} for {backend.framework}, "
                    "expected names to be unique; choose another or unregister() the first."
                )
            self._backends[backend.key] = backend
        scopes.invalidate()
        return backend

    def unregister(self, name: str, framework: str | None = None) -> None:
        """Remove a backend, for tests and for plugins that unload."""
        with self.lock:
            key = self._one(name, framework, asked_by="unregister").key
            self._backends.pop(key)
            self._probed.pop(key, None)
        scopes.invalidate()

    def group(self, name: str, members: tuple[str, ...], framework: str) -> None:
        """Let `name` stand for several of a framework's backends in order, e.g. ``torch_sdpa``."""
        self._groups[framework, name] = members

    def backends(self, framework: str | None = None) -> tuple[Backend, ...]:
        """Return the backends in order of registration, of every framework or of one."""
        self.discover()
        return tuple(b for b in tuple(self._backends.values()) if framework in (None, b.framework))

    def names(self, framework: str | None = None) -> tuple[str, ...]:
        """Return the registered names in order of registration, each once."""
        return tuple(dict.fromkeys(b.name for b in self.backends(framework)))

    def in_tree(self, framework: str | None = None) -> tuple[Backend, ...]:
        """Return the backends that this package declares; reads no setting, loads no plugin."""
        self._declare()
        return tuple(b for b in self._own.values() if framework in (None, b.framework))

    def in_tree_names(self, framework: str) -> tuple[str, ...]:
        """Return the names of :meth:`in_tree`, then those that stand for several of them."""
        alone = (backend.name for backend in self.in_tree(framework))
        return (*alone, *(name for found, name in self._groups if found == framework))

    def is_in_tree(self, backend: Backend) -> bool:
        """Whether this package declares the backend."""
        return self._own.get(backend.key) is backend

    def groups(self, framework: str | None = None) -> dict[str, tuple[str, ...]]:
        """Return the names that stand for several backends."""
        self.discover()
        names = dict.fromkeys(name for found, name in self._groups if framework in (None, found))
        return {name: self._members(name, framework) for name in names}

    def __iter__(self) -> Iterator[Backend]:
        return iter(self.backends())

    def __getitem__(self, name: str | Key) -> Backend:
        if isinstance(name, tuple):
            return self._one(name[1], name[0], asked_by="backend")
        return self._one(name, None, asked_by="backend")

    def get(self, name: object, framework: str | None = None) -> Backend:
        """Return a backend; without `framework`, only one may have the name.

        >>> registry.get("flex", framework="torch") is registry["flex"]
        True
        """
        return self._one(name, framework, asked_by="backend")

    def known(self, name: object, *, asked_by: str, framework: str | None = None) -> str:
        """Return the registered spelling of `name`, or raise :class:`UnknownBackend`."""
        found = self.expand(name, asked_by=asked_by, framework=framework)
        if found != (spelt(name),):
            raise UnknownBackend(
                f"got {asked_by} {name!r}, which stands for {', '.join(found)}; expected one."
            )
        return found[0]

    def expand(
        self, name: object, *, asked_by: str, framework: str | None = None
    ) -> tuple[str, ...]:
        """Return the backends that `name` (a name, a group or an enum member) stands for.

        Without `framework`, those of every framework: a call takes the ones that it has.
        """
        spelling = spelt(name)
        if not (found := self._members(spelling, framework)):
            self.discover()
            found = self._members(spelling, framework)
        if found:
            return found
        if elsewhere := self._frameworks(spelling):
            raise UnknownBackend(
                f"got {asked_by} {name!r}, which runs {' and '.join(elsewhere)}'s arrays, expected "
                f"one for {framework}'s: {', '.join(self.names(framework)) or 'none is known'}."
            )
        known = dict.fromkeys(key[1] for key in (*self._backends, *self._groups))
        raise unknown(name, known, asked_by=asked_by)

    def probe(self, which: Backend | str | Key) -> Probe:
        """Ask whether a backend can be loaded here; a probe that raises or lies is Missing."""
        backend = which if isinstance(which, Backend) else self[which]
        if backend.key not in self._probed:
            ours = self.is_in_tree(backend)
            self._probed[backend.key] = answer(backend, backend.probe, ours)
        return self._probed[backend.key]

    def foretell(self, backend: Backend, facts: Facts) -> Probe | None:
        """Ask for the probe of another machine; None where the backend foretells nothing."""
        foretell = backend.foretell
        return None if foretell is None else answer(backend, lambda: foretell(facts))

    def configurations(self, backend: Backend, problem: Problem) -> list[dict[str, Any]]:
        """Return what tuning may choose among, ``{}`` first; none of a `configs` that raises."""
        try:
            return [{}, *(dict(c) for c in (backend.configs(problem) if backend.configs else ()))]
        except FAULTS as error:
            self.faults[f"{backend.name} ({backend.framework})"] = f"{told(error)} from its configs"
            return [{}]

    def distrust(self, which: Backend | str | Key, fault: str) -> None:
        """Note that a backend which probed as available could not be loaded."""
        backend = which if isinstance(which, Backend) else self[which]
        self._probed[backend.key] = Missing(fault, backend.how_to_mend)
        scopes.invalidate()

    def discover(self) -> None:
        """Register the backends of this package, then those of installed entry points, once."""
        with self.lock:
            self._declare()
            if self._discovered:
                return
            with_plugins = settings.current().plugins  # an error here leaves nothing half done
            self._discovered = True
            for entry in self._entries() if with_plugins else ():
                self._plug_in(entry)

    def _declare(self) -> None:
        with self.lock:
            if self._declared:
                return
            self._declared = True  # so that those which are declared now can register
            try:
                for module in self._modules:
                    importlib.import_module(module).declare(self)
            except BaseException:  # an interrupt: all of them or none
                self._declared = False
                self._backends.clear()
                raise
            self._own = dict(self._backends)

    def _entries(self) -> list[EntryPoint]:
        try:
            return sorted(entry_points(group=GROUP), key=lambda e: (e.name, e.value))
        except Exception as error:  # one package's metadata that is garbled spoils them all
            self.faults["entry points"] = f"{told(error)}, while their names were read"
            return []

    def _plug_in(self, entry: EntryPoint) -> None:
        try:
            found = entry.load()
            found = found() if callable(found) and not isinstance(found, Backend) else found
            for backend in found if isinstance(found, (list, tuple)) else (found,):
                self.register(backend)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin's fault, even sys.exit, takes no program down
            self.faults[f"{entry.name} ({entry.value})"] = told(error)

    def _members(self, spelling: str, framework: str | None) -> tuple[str, ...]:
        groups = [
            name
            for (found, group), members in tuple(self._groups.items())
            if group == spelling and framework in (None, found)
            for name in members
        ]
        alone = [name for found, name in tuple(self._backends) if framework in (None, found)]
        return tuple(dict.fromkeys([*groups, *(name for name in alone if name == spelling)]))

    def _frameworks(self, spelling: str) -> list[str]:
        every = (*self._backends, *self._groups)
        return list(dict.fromkeys(framework for framework, name in every if name == spelling))

    def _one(self, name: object, framework: str | None, *, asked_by: str) -> Backend:
        if type(name) is str and framework is not None:
            found = self._backends.get((framework, name))  # no group has the name of a backend
            if found is not None:
                return found
        spelling = self.known(name, asked_by=asked_by, framework=framework)
        homes = [framework] if framework else self._frameworks(spelling)
        if len(homes) > 1:
            raise UnknownBackend(
                f"got {asked_by} {name!r}, which {' and '.join(homes)} have, expected the framework"
                f" with it: registry[{homes[0]!r}, {spelling!r}]."
            )
        return self._backends[homes[0], spelling]


registry = Registry()
"""The registry of this process."""
kept_free(registry.lock)

register = registry.register
