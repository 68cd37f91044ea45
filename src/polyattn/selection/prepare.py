"""From a problem and wishes to a callable, for any framework: select, then prepare the kernel."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from polyattn import settings
from polyattn.errors import MissingDependency, PolyattnError, UnknownBackend
from polyattn.forks import kept_free
from polyattn.problem import Problem
from polyattn.problem.machine import Facts
from polyattn.selection import Selection
from polyattn.selection.evidence import UNMEASURED, Evidence, calibration, of_machine
from polyattn.selection.first_result import FirstResult
from polyattn.selection.platforms import find_platform
from polyattn.selection.registry import Backend, registry
from polyattn.selection.select import Tuned, select
from polyattn.selection.wishes import Wishes
from polyattn.tuning import lookup

__all__ = ["Plan", "kernel_of", "prepare", "select_here"]

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Plan:
    """A selection, and the kernel prepared for it: ``kernel(q, k, v, mask, bias, sinks)``."""

    selection: Selection
    kernel: Kernel

    @property
    def is_final(self) -> bool:
        """Whether the kernel may be kept: that of a plugin still checks its first result.

        Once that was right, :func:`prepare` gives the bare kernel for the same problem.
        """
        return not isinstance(self.kernel, FirstResult)


def select_here(problem: Problem, wishes: Wishes, facts: Facts | None = None) -> Selection:
    """Select a backend for the problem; measured times of this machine take part.

    Where the choice would rest on a figure that nobody has measured yet, the machine is calibrated
    first, if it may be here (see `polyattn.selection.evidence`). With `facts` nothing is.
    """
    if facts is not None:
        return select(problem, wishes, registry, facts=facts, evidence=of_machine.told(facts))
    tuned = _tuned(problem)
    evidence = _evidence(problem)
    selection = select(problem, wishes, registry, tuned=tuned, evidence=evidence)
    if not calibration.wanted(selection, problem, evidence) or not calibration.calibrate(problem):
        return selection
    return select(problem, wishes, registry, tuned=tuned, evidence=_evidence(problem))


def _evidence(problem: Problem) -> Evidence:
    return of_machine.this_machine(problem.framework) if problem.device == "cpu" else UNMEASURED


def _tuned(problem: Problem) -> list[Tuned]:
    if not settings.current().tuning or (platform := find_platform(problem.framework)) is None:
        return []
    device, versions = platform.device_description(problem.device), platform.versions()
    rows = lookup.measured(problem, device, versions)
    found = [Tuned(row.backend, json.loads(row.config), row.median_s) for row in rows]
    return [one for one in found if not one.config or _is_offered(one, problem)]


def _is_offered(one: Tuned, problem: Problem) -> bool:
    """Say whether a backend knows the configuration that it was measured with, here or elsewhere.

    Tables come from other machines and other versions; a kernel is told nothing that it would have
    to guess at.
    """
    try:
        backend = registry.get(one.backend, problem.framework)
    except UnknownBackend:
        return False
    return one.config in registry.configurations(backend, problem)


def prepare(problem: Problem, wishes: Wishes) -> Plan:
    """Select and prepare. A backend that lied in its probe is distrusted, and asked no more.

    Raises MissingDependency where one that was asked for cannot be loaded, PolyattnError where it
    gives nothing that can be called; an automatic choice goes to the next.
    """
    while True:
        selection = select_here(problem, wishes)
        backend = registry.get(selection.backend, problem.framework)
        try:
            return Plan(selection, _first_checked(backend, selection, problem))
        except Exception as error:
            if _is_on_purpose(error, backend):
                raise
            fault = f"it probed as available, but {_told(error)}"
            registry.distrust(backend, fault)
            if selection.source.is_request:
                kind = PolyattnError if isinstance(error, _BrokenError) else MissingDependency
                raise kind(
                    f"got a request for {selection.backend} ({selection.source}); {fault}. "
                    "Mend the package that brings it, or ask for another backend."
                ) from error


class _BrokenError(PolyattnError):
    """A backend whose code does not give what it has to."""


def _is_on_purpose(error: Exception, backend: Backend) -> bool:
    """Whether an error is meant for the caller, such as a setting that cannot be met."""
    if isinstance(error, (_BrokenError, MissingDependency)):
        return False
    if isinstance(error, MemoryError):  # which says nothing about the backend
        return True
    # a deep stack says nothing of our own, either; a plugin may call itself without end
    ours = isinstance(error, (PolyattnError, RecursionError))
    return ours and registry.is_in_tree(backend)


_ANEW = "same name and overload name multiple times"
"""What torch says where an operator is registered again."""


def _told(error: Exception) -> str:
    if isinstance(error, _BrokenError):
        return str(error)
    if _ANEW in str(error):
        return (
            "polyattn was imported anew in this process, after its modules had been taken out of "
            "sys.modules, and torch keeps operators of the first import: start a new process"
        )
    return f"loading it raised {type(error).__name__}: {error}"


def kernel_of(selection: Selection, problem: Problem) -> Kernel:
    """Return the kernel of a selection, loading its backend if this is its first use."""
    backend = registry.get(selection.backend, problem.framework)
    prepare = _loaded(backend).prepare
    kernel = _called(lambda: prepare(problem, selection.config))
    if not callable(kernel):
        raise _BrokenError(
            f"its prepare(problem, config) gave {type(kernel).__name__}, expected a callable kernel"
        )
    return kernel  # type: ignore[no-any-return]


def _called(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except SystemExit as error:  # a plugin's fault, which ends no program
        raise _BrokenError(f"loading it raised SystemExit: {error}") from error


def _first_checked(backend: Backend, selection: Selection, problem: Problem) -> Kernel:
    """Prepare; a plugin's kernel is checked until one result for such a problem was right."""
    kernel = kernel_of(selection, problem)
    if problem.compiled or registry.is_in_tree(backend):
        return kernel
    right = _loaded(backend).right
    this = problem, json.dumps(selection.config, sort_keys=True, default=repr)
    platform = find_platform(problem.framework)
    if this in right or platform is None:
        return kernel

    def note() -> None:
        if len(right) >= _MOST_RIGHT:
            right.clear()
        right.add(this)

    return FirstResult(kernel, backend.name, problem, platform.described, note)


_MOST_RIGHT = 4096
"""How many problems are remembered as answered rightly, for each plugin."""


@dataclass
class _Loaded:
    """A backend that was loaded, and the problems whose results were seen to be right."""

    backend: Backend
    prepare: Callable[[Problem, Mapping[str, Any]], Any]
    right: set[tuple[Problem, str]] = field(default_factory=set)


_loads: dict[tuple[str, str], _Loaded] = {}


def _loaded(backend: Backend) -> _Loaded:
    """Load a backend once; one that was registered again under the name is another backend."""
    known = _loads.get(backend.key)
    if known is not None and known.backend is backend:
        return known
    # a child that is forked amid an import would wait for it for ever; what a plugin does in its
    # load() nobody knows, maybe calls in other threads
    with _loading if registry.is_in_tree(backend) else nullcontext():
        prepare = _called(backend.load)
        if not callable(prepare):
            raise _BrokenError(
                f"its load() gave {type(prepare).__name__}, expected prepare(problem, config)"
            )
        known = _loads[backend.key] = _Loaded(backend, prepare)
    return known


_loading = kept_free(threading.RLock())
