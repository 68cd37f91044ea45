"""The extension module ``polyattn._native``: whether it is here, and which instruction set runs.

An installation without a C++20 compiler has no such module; everything else works without it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from polyattn import settings
from polyattn.errors import MissingDependency, SettingsError
from polyattn.selection.registry import Available, Missing, Probe

__all__ = [
    "BuildInfo", "build_info", "how_to_build", "isa_index", "isas", "load", "pool", "status",
]  # fmt: skip

PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class BuildInfo:
    """How the extension was built. `compiled`: its instruction sets, best first."""

    version: str
    compiler: str
    compiled: tuple[str, ...]


def load() -> ModuleType:
    """Return ``polyattn._native``; raise :class:`MissingDependency` where it is not built."""
    found = _import()
    if isinstance(found, Missing):
        raise MissingDependency(
            f"got no native CPU kernels: {found.reason}. To have them: {found.how_to_get_it}."
        )
    return found


def status() -> Probe:
    """Return whether the kernels are here, as backends' probes answer; imports no framework.

    >>> type(status()).__name__ in ("Available", "Missing")
    True
    """
    found = _import()
    if isinstance(found, Missing):
        return found
    best = isas()[0]
    if best == "generic" and settings.current().native_isa == "best":
        # 0.4 x torch's kernel on dense problems, by `polyattn bench cpu`
        return Missing(
            "this processor runs none of the vector instruction sets of the kernels, only their "
            "plain form, which is slower than torch's own kernel",
            "set POLYATTN_NATIVE_ISA=generic to use it all the same",
        )
    return Available(build_info().version, f"best here: {best}", frozenset({"cpu"}))


def isas() -> tuple[str, ...]:
    """Return the instruction sets that this build has and this processor runs, best first.

    Behind `generic` come `amx`, which is for bfloat16 alone and not every process may run (see
    :func:`polyattn.native.forms.for_bfloat16`), and `amx_twin`, which is its algorithm in plain
    C++, for tests, and taken only by name.
    """
    return tuple(load().isas())


def build_info() -> BuildInfo:
    """Return the version, the compiler and the instruction sets of the build."""
    built = load().build()
    return BuildInfo(str(built["version"]), str(built["compiler"]), tuple(built["compiled"]))


def pool() -> str:
    """Return whose threads run the kernels now: those of a libgomp in this process, or our own."""
    return str(load().threads_in_use())


def isa_index() -> int:
    """Return the place of the instruction set to use in :func:`isas`; every call asks anew.

    0, the best, unless ``POLYATTN_NATIVE_ISA`` names another; one that this build or this
    processor lacks raises :class:`SettingsError`.
    """
    return _index_of(settings.raw(settings.NATIVE_ISA))


@functools.lru_cache(maxsize=64)
def _index_of(variable: object) -> int:
    """Return the place of what the variable names; parsed once for each of its values."""
    wanted = settings.current().native_isa
    if wanted == "best":
        return 0
    here = isas()
    if wanted in here:
        place = here.index(wanted)
        refusal = load().refusal(place)
        if refusal is None:
            return place
        raise SettingsError(
            f"got POLYATTN_NATIVE_ISA={wanted!r}, which this process may not run: {refusal}; "
            f"expected best or another of {', '.join(here)}. Unset it for the best ({here[0]})."
        )
    compiled = wanted in build_info().compiled
    lacks = "this processor lacks" if compiled else "this build of polyattn lacks"
    raise SettingsError(
        f"got POLYATTN_NATIVE_ISA={wanted!r}, which {lacks}; expected best or one of "
        f"{', '.join(here)}. Unset it for the best of them ({here[0]})."
    )


@functools.lru_cache(maxsize=1)
def _import() -> ModuleType | Missing:
    """Import once; what is lacking does not come while the process runs."""
    try:
        return importlib.import_module("polyattn._native")
    except ImportError as error:
        return _missing(error)


def _missing(error: ImportError) -> Missing:
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    found = sorted(
        path.name for path in PACKAGE.glob("_native.*") if path.suffix in (".so", ".pyd")
    )
    if any(name == f"_native{suffix}" for name in found for suffix in suffixes):
        return Missing(f"{found[0]} cannot be loaded here: {error}", how_to_build())
    if found:
        reason = f"{found[0]} was built for another Python, this one loads *{suffixes[0]}"
        return Missing(reason, how_to_build())
    reason = "this installation is pure Python: its build found no C++20 compiler or no CMake"
    return Missing(reason, how_to_build())


def how_to_build() -> str:
    """Return the command that builds the extension for this installation."""
    script = PACKAGE.parent.parent / "scripts" / "native"
    if script.exists():
        return f"run {script}, with a C++20 compiler on the PATH"
    return (
        "install a C++20 compiler (GCC 11, Clang 14 or Xcode 15, or newer), then install polyattn "
        "again from where it came: pip install --force-reinstall --no-deps --no-cache-dir -v ..."
    )
