"""Backends by name: those of this package, and those that other packages bring.

Third parties register through the entry-point group ``polyattn.backends`` (each entry names a
:class:`Backend` or a function that returns one or several) or by :meth:`Registry.register`.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from polyattn import scopes, settings
from polyattn.capabilities import Capabilities, Reason
from polyattn.errors import PolyattnError, UnknownBackend
from polyattn.problem import Problem
from polyattn.spelling import spelt, unknown

__all__ = ["Available", "Backend", "Missing", "Probe", "Registry", "register", "registry"]

GROUP = "polyattn.backends"
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclass(frozen=True)
class Available:
    """The backend can be loaded here. `devices` are those of its devices that are present."""

    version: str
    detail: str = ""
    devices: frozenset[str] | None = None


@dataclass(frozen=True)
class Missing:
    """The backend cannot be loaded here, and what would change that."""

    reason: str
    how_to_get_it: str


Probe = Available | Missing


@dataclass(frozen=True)
class Backend:
    """A named way to run attention.

    `capabilities`: one declaration, or several of which the first that names the problem's
    device counts. `probe`: ``() -> Available | Missing``, importing nothing heavy.
    `load`: ``() -> prepare``, where ``prepare(problem, config) -> kernel`` and
    ``kernel(q, k, v, mask, bias, sinks)`` gives ``out``, or ``(out, lse)`` if `problem.lse`;
    arrays arrive in the problem's layout. Of a paged problem, k and v are the pages and the kernel
    takes ``(block_table, lengths)`` as a last argument.
    `extra`: ``(problem) -> reasons`` for what a table cannot say.
    `package`: the distribution that a dry run looks up in the facts it was given.
    `configs`: ``(problem) -> configurations`` that tuning may choose among, beside ``{}``.
    """

    name: str
    framework: str
    capabilities: Capabilities | tuple[Capabilities, ...]
    probe: Callable[[], Probe]
    load: Callable[[], Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]]
    extra: Callable[[Problem], Iterable[Reason]] | None = None
    package: str | None = None
    summary: str = ""
    configs: Callable[[Problem], Iterable[Mapping[str, Any]]] | None = None

    def capabilities_for(self, device: str) -> Capabilities:
        """Return the declaration for `device` (the first one if none names it)."""
        declared = self.capabilities
        every = declared if isinstance(declared, tuple) else (declared,)
        return next((c for c in every if device in c.devices), every[0])

    def check(self, problem: Problem) -> tuple[Reason, ...]:
        """Return every reason against running `problem`, available or not."""
        reasons = self.capabilities_for(problem.device).check(problem)
        return (*reasons, *(self.extra(problem) if self.extra else ()))


class Registry:
    """An ordered table of backends; probes are asked once and remembered."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}
        self._groups: dict[str, tuple[str, ...]] = {}
        self._probed: dict[str, Probe] = {}
        self._lock = threading.RLock()
        self._in_tree: list[str] = []
        self.faults: dict[str, str] = {}  # entry points that could not be loaded, and why

    def register(self, backend: Backend) -> Backend:
        """Add a backend; a name that is taken, or no name at all, is an error."""
        if not isinstance(backend, Backend):
            raise PolyattnError(
                f"got {type(backend).__name__} to register, expected a polyattn.registry.Backend."
            )
        if not _NAME.match(backend.name):
            raise PolyattnError(
                f"got the backend name {backend.name!r}, expected lower case letters, digits "
                "and underscores, a letter first."
            )
        with self._lock:
            if backend.name in self._backends or backend.name in self._groups:
                raise PolyattnError(
                    f"got a second backend called {backend.name!r}, expected names to be "
                    "unique; choose another or unregister() the first."
                )
            self._backends[backend.name] = backend
        scopes.invalidate()
        return backend

    def unregister(self, name: str) -> None:
        """Remove a backend, for tests and for plugins that unload."""
        with self._lock:
            self._backends.pop(self.known(name, asked_by="unregister"))
            self._probed.pop(name, None)
        scopes.invalidate()

    def group(self, name: str, members: tuple[str, ...]) -> None:
        """Let `name` stand for several backends in order, e.g. ``torch_sdpa``."""
        self._groups[name] = members

    def names(self, framework: str | None = None) -> tuple[str, ...]:
        """Return the registered names in order of registration."""
        self.discover()
        every = tuple(self._backends.items())
        return tuple(n for n, b in every if framework in (None, b.framework))

    def groups(self) -> dict[str, tuple[str, ...]]:
        """Return the names that stand for several backends."""
        self.discover()
        return dict(self._groups)

    def __iter__(self) -> Iterator[Backend]:
        return iter([self._backends[name] for name in self.names()])

    def __getitem__(self, name: str) -> Backend:
        return self._backends[self.known(name, asked_by="backend")]

    def known(self, name: object, *, asked_by: str) -> str:
        """Return the registered spelling of `name`, or raise :class:`UnknownBackend`."""
        found = self.expand(name, asked_by=asked_by)
        if len(found) != 1 or str(name).lower() in self._groups:
            raise UnknownBackend(
                f"got {asked_by} {name!r}, which stands for {', '.join(found)}; expected one."
            )
        return found[0]

    def expand(self, name: object, *, asked_by: str) -> tuple[str, ...]:
        """Return the backends that `name` (a name, a group or an enum member) stands for."""
        spelling = spelt(name)
        if spelling not in self._backends and spelling not in self._groups:
            self.discover()
        if spelling in self._groups:
            return self._groups[spelling]
        if spelling not in self._backends:
            raise unknown(name, (*self._backends, *self._groups), asked_by=asked_by)
        return (spelling,)

    def probe(self, name: str) -> Probe:
        """Ask whether a backend can be loaded here; a probe that raises or lies is Missing."""
        if name not in self._probed:
            self._probed[name] = _probe(self._backends[name])
        return self._probed[name]

    def distrust(self, name: str, fault: str) -> None:
        """Note that a backend which probed as available could not be loaded."""
        self._probed[name] = Missing(fault, "mend or uninstall the package that brings it")
        scopes.invalidate()

    def discover(self) -> None:
        """Register the backends of this package, then those of installed entry points, once."""
        with self._lock:
            if self._in_tree:
                return
            with_plugins = settings.current().plugins  # an error here leaves nothing half done
            self._in_tree.extend(IN_TREE)
            for module in IN_TREE:
                importlib.import_module(module).declare(self)
            if with_plugins:
                for entry in sorted(entry_points(group=GROUP), key=lambda e: (e.name, e.value)):
                    self._plug_in(entry)

    def _plug_in(self, entry: EntryPoint) -> None:
        try:
            found = entry.load()
            found = found() if callable(found) and not isinstance(found, Backend) else found
            for backend in found if isinstance(found, (list, tuple)) else (found,):
                self.register(backend)
        except Exception as error:  # a plugin's fault must not take the program down
            self.faults[f"{entry.name} ({entry.value})"] = f"{type(error).__name__}: {error}"


IN_TREE = ("polyattn.declared.torch_backends",)
"""Modules that declare this package's backends; they import no framework."""


def _probe(backend: Backend) -> Probe:
    try:
        answer = backend.probe()
    except Exception as error:  # a plugin's fault is a reason, not a crash
        return Missing(
            f"its probe raised {type(error).__name__}: {error}",
            f"mend or uninstall the package that brings {backend.name}",
        )
    if not isinstance(answer, (Available, Missing)):
        return Missing(
            f"its probe answered {answer!r}, expected Available(...) or Missing(...)",
            f"mend or uninstall the package that brings {backend.name}",
        )
    return answer


registry = Registry()
"""The registry of this process."""

register = registry.register
