"""What a framework brings to the choice of a backend: its versions, its devices, its own call.

The core imports no framework. Each front registers a :class:`Platform` when it is imported, and
:data:`FACES` says, here and nowhere else, which module to import for one that is not there yet.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from polyattn.errors import PolyattnError, near_matches
from polyattn.problem import Problem

if TYPE_CHECKING:
    from polyattn.selection.processor_kind import Machine

__all__ = [
    "FACES", "Described", "Platform", "Probe", "Prober", "find_platform", "platform_of",
    "register_platform",
]  # fmt: skip

FACES = {"torch": "polyattn.torch.api", "jax": "polyattn.jax.attend"}
"""The module of each framework whose import registers its platform."""


class Described(NamedTuple):
    """An array by its shape, dtype and device, as every framework can tell them."""

    shape: tuple[int, ...]
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype} on {self.device}"


class Probe(Protocol):
    """Two kernels on one small problem, warm: the native one, and torch's (`rival`, by name).

    `error` is how far their results are apart, `tolerance` what is allowed.
    """

    problem: Problem
    rival: str
    error: float
    tolerance: float

    def native(self) -> object:
        """Run the native kernel once."""

    def theirs(self) -> object:
        """Run torch's kernel once."""


class Prober(Protocol):
    """How a framework's kernels are tried on this machine, for a calibration."""

    def machine(self) -> Machine:
        """Return this machine, as it stands now: threads may change."""

    def refusal(self) -> str | None:
        """Say why nothing may be tried here and now; None where it may."""

    def quiet(self) -> AbstractContextManager[None]:
        """Return a scope in which the surroundings of the caller take no part."""

    def probe(self, dtype: str, kind: str) -> Probe:
        """Prepare a small problem of this kind (see `polyattn.selection.evidence`)."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """One framework, as far as the choice of a backend needs it.

    `versions`: the libraries that measured times depend on, canonically.
    `device_description`: ``(kind) -> text``, the device that measured times belong to.
    `present_device`: the device that a layer would be put on here, and its architecture.
    `described`: ``(x) -> Described``, or None for what is no array of this framework.
    `attention`: the framework's call, as :func:`polyattn.torch.attention`.
    `prober`: what tries the framework's CPU kernels here; None where nothing is to be tried.
    """

    framework: str
    versions: Callable[[], str]
    device_description: Callable[[str], str]
    present_device: Callable[[], tuple[str, str | None]]
    described: Callable[[Any], Described | None]
    attention: Callable[..., Any]
    prober: Prober | None = None


_registered: dict[str, Platform] = {}


def register_platform(platform: Platform) -> None:
    """Make a framework known; its front does so when it is imported."""
    _registered[platform.framework] = platform


def find_platform(framework: str) -> Platform | None:
    """Return a framework's platform, importing its front; None where it is not to be had here."""
    if framework not in _registered and framework in FACES:
        try:
            importlib.import_module(FACES[framework])
        except (ImportError, OSError):  # not installed, or broken, as probes will say
            return None
    return _registered.get(framework)


def platform_of(framework: str) -> Platform:
    """Return a framework's platform.

    Raises MissingDependency where the framework is not installed, and PolyattnError for one that
    polyattn has no front for.

    >>> platform_of("torch").framework
    'torch'
    """
    if framework not in _registered and framework in FACES:
        importlib.import_module(FACES[framework])
    if framework not in _registered:
        known = tuple(dict.fromkeys((*FACES, *_registered)))
        raise PolyattnError(
            f"got the framework {framework!r}, which has no front here, expected one of "
            f"{', '.join(known)}.{near_matches(framework, known)}"
        )
    return _registered[framework]
