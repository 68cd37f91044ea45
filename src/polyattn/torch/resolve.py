"""From a checked call to a callable: the wishes in force, the choice, the prepared kernel."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from polyattn import scopes, settings, tables
from polyattn.decide import Tuned, Wishes, select
from polyattn.errors import MissingDependency, PolyattnError
from polyattn.facts import Facts
from polyattn.problem import Problem
from polyattn.processor import processor
from polyattn.registry import Backend, registry
from polyattn.requests import Request
from polyattn.selection import Selection

__all__ = ["Plan", "choose", "plan_for", "prepared", "wishes"]


@dataclass(frozen=True)
class Plan:
    """A choice and the kernel that it prepared: ``kernel(q, k, v, mask, bias, sinks)``."""

    selection: Selection
    kernel: Callable[..., Any]


def wishes(
    backend: Any = None, layer: frozenset[str] | None = None, scope: str | None = None,
    module: str | None = None,
) -> Wishes:  # fmt: skip
    """Gather everything that is asked for here; unknown names raise UnknownBackend."""
    forced = scopes.state.forced
    env = settings.current().backend
    policy = (module or "").partition("\n")[0]
    return Wishes(
        forced=Request(registry.expand(forced, asked_by="force")) if forced else Request(),
        call=Request() if backend is None else Request.make(_names(backend)),
        scope=Request.decode(scope or ""),
        module=Request.decode("" if policy == "-" else policy),
        env=Request(registry.expand(env, asked_by="POLYATTN_BACKEND")) if env else Request(),
        layer=layer,
        on_unsupported=settings.current().on_unsupported,
    )


def _names(backend: Any) -> tuple[Any, ...]:
    return tuple(backend) if isinstance(backend, (list, tuple)) else (backend,)


def choose(problem: Problem, wishes: Wishes, facts: Facts | None = None) -> Selection:
    """Select a backend for the problem; measured times of this machine take part."""
    tuned = [] if facts is not None else _tuned(problem)
    return select(problem, wishes, registry, tuned=tuned, facts=facts)


def _tuned(problem: Problem) -> list[Tuned]:
    if not settings.current().tuning:
        return []
    rows = tables.measured(problem, device_description(problem.device), library_versions())
    return [Tuned(row.backend, json.loads(row.config), row.median_s) for row in rows]


def plan_for(problem: Problem, wishes: Wishes) -> Plan:
    """Select and prepare. A backend that lied in its probe is distrusted, and asked no more."""
    while True:
        selection = choose(problem, wishes)
        try:
            kernel = prepared(selection, problem)
        except (ImportError, OSError, AttributeError) as error:
            fault = f"it probed as available, but loading it raised {type(error).__name__}: {error}"
            registry.distrust(selection.backend, fault)
            if selection.source.is_request:
                raise MissingDependency(
                    f"got a request for {selection.backend} ({selection.source}); {fault}. "
                    "Mend the package that brings it, or ask for another backend."
                ) from error
            continue
        return Plan(selection, kernel)


def prepared(selection: Selection, problem: Problem) -> Callable[..., Any]:
    """Return the kernel of a selection, loading its backend if this is its first use."""
    prepare = _loaded(registry[selection.backend])
    kernel = prepare(problem, selection.config)
    if not callable(kernel):
        raise PolyattnError(
            f"got {type(kernel).__name__} from the backend {selection.backend!r}, expected "
            "prepare(problem, config) to return a callable kernel."
        )
    return kernel


_prepares: dict[str, tuple[Backend, Callable[..., Any]]] = {}


def _loaded(backend: Backend) -> Callable[..., Any]:
    """Load a backend once; one that was registered again under the name is another backend."""
    known = _prepares.get(backend.name)
    if known is None or known[0] is not backend:
        known = _prepares[backend.name] = backend, backend.load()
    return known[1]


@functools.lru_cache(maxsize=1)
def library_versions() -> str:
    """Return the versions that measured times depend on, canonically."""
    from polyattn import __version__

    cuda = f" cuda={torch.version.cuda}" if torch.version.cuda else ""
    return f"polyattn={__version__} torch={torch.__version__}{cuda}"


def present_device() -> tuple[str, str | None]:
    """Return the device that a layer would be put on here, and its compute capability."""
    if not torch.cuda.is_available():
        return "cpu", None
    return "cuda", "sm_{}{}".format(*torch.cuda.get_device_capability())


def device_description(kind: str) -> str:
    """Describe the device that measured times belong to."""
    if kind == "cuda" and torch.cuda.is_available():
        return f"cuda:{torch.cuda.get_device_name()}"
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return f"cpu:{processor()[0]} {capability} threads={threads}"
