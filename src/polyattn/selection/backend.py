"""What a backend is: a named way to run attention on one framework's arrays.

Its code may be anybody's, and cannot end a program: what it raises where it is asked, an exit
included, is a reason against it or a finding about it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polyattn.errors import PolyattnError, near_matches
from polyattn.problem import Problem
from polyattn.problem.machine import Facts
from polyattn.selection.capabilities import Capabilities, Reason

__all__ = [
    "FAULTS", "FRAMEWORKS", "Available", "Backend", "Key", "Missing", "Probe", "answer",
    "check_backend", "told",
]  # fmt: skip

FRAMEWORKS = ("torch", "jax", "numpy")
"""Whose arrays a backend may run."""
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")

FAULTS = (Exception, SystemExit)
"""What a backend's own code may raise without ending the program."""
Key = tuple[str, str]  # framework, name


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
    """A named way to run attention on one framework's arrays.

    `capabilities`: one declaration, or several of which the first that names the problem's
    device counts. `probe`: ``() -> Available | Missing``, importing nothing heavy.
    `load`: ``() -> prepare``, where ``prepare(problem, config) -> kernel`` and
    ``kernel(q, k, v, mask, bias, sinks)`` gives ``out``, or ``(out, lse)`` if `problem.lse`;
    arrays arrive in the problem's layout. Of a paged problem, k and v are the pages and the kernel
    takes ``(block_table, lengths)`` as a last argument; of a quantised one they are the codes, and
    the last argument is ``(key_scales, value_scales, block_size)``.
    `extra`: ``(problem) -> reasons`` for what a table cannot say.
    `package`: the distribution that a dry run looks up in the facts it was given.
    `configs`: ``(problem) -> configurations`` that tuning may choose among, beside ``{}``.
    `foretell`: ``(facts) -> Available | Missing``, the probe of a machine that one does not have.
    `any_lengths`: neither the check nor a kernel depends on batch and lengths but by their order,
    by whether one of them is 0 or 1 and, below 17 keys and at powers of two, by their size; kernels
    take them from the arrays. Then one choice and one kernel serve a cache that grows.
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
    foretell: Callable[[Facts], Probe] | None = None
    any_lengths: bool = False

    @property
    def key(self) -> Key:
        """The framework and the name, by which a registry knows the backend."""
        return self.framework, self.name

    @property
    def how_to_mend(self) -> str:
        """What to do where the backend's own code is at fault."""
        return f"mend or uninstall the package that brings {self.name}"

    def capabilities_for(self, device: str) -> Capabilities:
        """Return the declaration for `device` (the first one if none names it)."""
        declared = self.capabilities
        if not isinstance(declared, tuple):
            return declared
        for one in declared:
            if device in one.devices:
                return one
        return declared[0]

    def check(self, problem: Problem) -> tuple[Reason, ...]:
        """Return every reason against running `problem`, available or not.

        A declaration that raises, or that gives anything else than reasons, is a reason itself.
        """
        declared = self._reasons("capabilities", self._declared, problem)
        if (extra := self.extra) is None:
            return declared
        return (*declared, *self._reasons("extra", extra, problem))

    def _declared(self, problem: Problem) -> tuple[Reason, ...]:
        return self.capabilities_for(problem.device).check(problem)

    def _reasons(
        self, part: str, ask: Callable[[Problem], Iterable[Reason]], problem: Problem
    ) -> tuple[Reason, ...]:
        try:
            found = tuple(ask(problem))
            said = None
            for reason in found:
                if not isinstance(reason, Reason):
                    said = f"{reason!r} from its {part}"
                    break
        except FAULTS as error:
            said, found = f"{told(error)} from its {part}", ()
        return (
            found if said is None else (Reason("declaration", said, "Reasons", self.how_to_mend),)
        )


def told(error: BaseException) -> str:
    """Return an error's type and text, to name it in a reason."""
    return f"{type(error).__name__}: {error}"


def check_backend(backend: Backend) -> None:
    """Refuse what cannot be a backend, in words that its author understands."""
    if not isinstance(backend, Backend):
        raise PolyattnError(
            f"got {type(backend).__name__} to register, expected a polyattn.registry.Backend."
        )
    if not (isinstance(backend.name, str) and _NAME.match(backend.name)):
        raise PolyattnError(
            f"got the backend name {backend.name!r}, expected lower case letters, digits "
            "and underscores, a letter first."
        )
    if backend.framework not in FRAMEWORKS:
        raise PolyattnError(
            f"got the framework {backend.framework!r} of the backend {backend.name!r}, expected "
            f"one of {', '.join(FRAMEWORKS)}.{near_matches(backend.framework, FRAMEWORKS)}"
        )
    declared = backend.capabilities
    every = declared if isinstance(declared, tuple) else (declared,)
    if not every or not all(isinstance(one, Capabilities) for one in every):
        raise PolyattnError(
            f"got {declared!r} as the capabilities of the backend {backend.name!r}, expected "
            "polyattn.capabilities.Capabilities, or a tuple of them."
        )
    for part in ("probe", "load", "extra", "configs", "foretell"):
        value = getattr(backend, part)
        if not callable(value) and (value is not None or part in ("probe", "load")):
            raise PolyattnError(
                f"got {value!r} as the {part} of the backend {backend.name!r}, expected a function."
            )


def answer(backend: Backend, ask: Callable[[], Probe], ours: bool = False) -> Probe:
    """Return what a probe answers; one that raises, exits or answers nonsense is Missing.

    `ours`: what a deep stack or full memory raises is the call's, for answers are remembered.
    """
    try:
        said = ask()
        if isinstance(said, Available) and said.devices is not None:
            said = Available(said.version, said.detail, frozenset(said.devices))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin's fault, even sys.exit, is a reason, not an end
        if ours and isinstance(error, (MemoryError, RecursionError)):
            raise
        return Missing(f"its probe raised {told(error)}", backend.how_to_mend)
    if not isinstance(said, (Available, Missing)):
        fault = f"its probe answered {said!r}, expected Available(...) or Missing(...)"
        return Missing(fault, backend.how_to_mend)
    return said
