"""The only reader of ``os.environ``: each variable is parsed once, and again when it changes.

| variable | values | meaning |
|---|---|---|
| ``POLYATTN_BACKEND`` | a backend's name | request this backend everywhere (source ``ENV``) |
| ``POLYATTN_ON_UNSUPPORTED`` | ``error`` (default), ``fallback`` | if a request cannot be met |
| ``POLYATTN_CACHE_DIR`` | a directory | where the tuning table lives |
| ``POLYATTN_TUNING`` | ``on`` (default), ``off`` | whether measured times count |
| ``POLYATTN_PLUGINS`` | ``on`` (default), ``off`` | whether other packages' backends load |
| ``POLYATTN_NATIVE_ISA`` | ``best`` (default), ``avx2``, ... | instruction set of native_cpu |

A value that means nothing is an error that lists the valid ones, never ignored.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyattn import scopes
from polyattn.errors import SettingsError, near_matches

__all__ = [
    "BACKEND", "NATIVE_ISAS", "VARIABLES", "Settings", "compiler", "current", "raw", "reload",
    "variable",
]  # fmt: skip

VARIABLES = (
    "POLYATTN_BACKEND",
    "POLYATTN_ON_UNSUPPORTED",
    "POLYATTN_CACHE_DIR",
    "POLYATTN_TUNING",
    "POLYATTN_PLUGINS",
    "POLYATTN_NATIVE_ISA",
)

NATIVE_ISAS = ("generic", "avx2", "avx512", "avx512bf16", "neon")
"""The instruction sets that the native kernels know; which are here, ``polyattn.native`` says."""


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    >>> Settings.parse({"POLYATTN_BACKEND": "flex"}).backend
    'flex'
    """

    backend: str | None
    on_unsupported: str
    cache_dir: Path
    tuning: bool
    plugins: bool
    native_isa: str = "best"

    @classmethod
    def parse(cls, environ: dict[str, str]) -> Settings:
        """Read the variables from `environ`; raise :class:`SettingsError` for a bad value."""
        return cls(
            backend=_name(environ.get("POLYATTN_BACKEND")),
            on_unsupported=_choice(environ, "POLYATTN_ON_UNSUPPORTED", ("error", "fallback")),
            cache_dir=_cache_dir(environ),
            tuning=_choice(environ, "POLYATTN_TUNING", ("on", "off")) == "on",
            plugins=_choice(environ, "POLYATTN_PLUGINS", ("on", "off")) == "on",
            native_isa=_choice(environ, "POLYATTN_NATIVE_ISA", ("best", *NATIVE_ISAS)),
        )


def _name(value: str | None) -> str | None:
    return None if value is None or not value.strip() else value.strip().lower()


def _choice(environ: dict[str, str], variable: str, valid: tuple[str, ...]) -> str:
    value = environ.get(variable, "").strip().lower() or valid[0]
    if value not in valid:
        raise SettingsError(
            f"got {variable}={environ[variable]!r}, expected one of {', '.join(valid)}."
            f"{near_matches(value, valid)} Unset it for the default ({valid[0]})."
        )
    return value


def _cache_dir(environ: dict[str, str]) -> Path:
    named = environ.get("POLYATTN_CACHE_DIR", "").strip()
    if named:
        return Path(named).expanduser()
    if sys.platform == "win32" and environ.get("LOCALAPPDATA"):
        return Path(environ["LOCALAPPDATA"]) / "polyattn"
    home = Path(environ.get("HOME") or "~").expanduser()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "polyattn"
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "polyattn"


def _raw_reader() -> tuple[Callable[[Any], object], Callable[[str], Any]]:
    """Return the cheapest way to see whether a variable has changed, and its keys."""
    try:
        return os.environ._data.get, os.environ.encodekey  # type: ignore[attr-defined]
    except AttributeError:  # another Python than CPython
        return os.environ.get, str


raw, _key = _raw_reader()
BACKEND, NATIVE_ISA = _key("POLYATTN_BACKEND"), _key("POLYATTN_NATIVE_ISA")
"""``raw(BACKEND)`` is ``POLYATTN_BACKEND`` as the environment holds it now: part of cache keys."""


_current: Settings | None = None
_read: tuple[str | None, ...] = ()


def current() -> Settings:
    """Return the settings; they are parsed again only when a variable has changed."""
    global _current, _read
    found = tuple(map(os.environ.get, VARIABLES))
    if _current is None or found != _read:
        known = _current is not None
        _current, _read = Settings.parse(dict(os.environ)), found
        if known:
            scopes.invalidate()
    return _current


def compiler() -> str | None:
    """Return the C++ compiler that ``CXX`` names, or None; a build looks there first."""
    return os.environ.get("CXX", "").strip() or None


def variable(name: str) -> str | None:
    """Return a variable of the environment that another library reads, to show how it stands."""
    return os.environ.get(name)


def reload() -> Settings:
    """Read the environment again now; compiled code, which cannot see it change, obeys too."""
    global _current
    _current = None
    settings = current()
    scopes.invalidate()
    return settings
