"""The only reader of ``os.environ``: each variable is parsed once, and again when it changes.

| variable | values | meaning |
|---|---|---|
| ``POLYATTN_BACKEND`` | a backend's name | request this backend everywhere (source ``ENV``) |
| ``POLYATTN_ON_UNSUPPORTED`` | ``error`` (default), ``fallback`` | if a request cannot be met |
| ``POLYATTN_CACHE_DIR`` | a directory | where the tuning table lives |
| ``POLYATTN_TUNING`` | ``on`` (default), ``off`` | whether measured times count |
| ``POLYATTN_PLUGINS`` | ``on`` (default), ``off`` | whether other packages' backends load |
| ``POLYATTN_NATIVE_ISA`` | ``best`` (default), ``avx2``, ... | instruction set of native_cpu |
| ``POLYATTN_TRACE_ACTIVATIONS`` | ``0`` (default), ``1`` | whether models are traced |
| ``POLYATTN_TRACE_LAYERS`` | a regular expression; default all | modules to trace, by name |
| ``POLYATTN_TRACE_STATS`` | names, as ``abs_mean,max``; default all | what to keep of a tensor |
| ``POLYATTN_TRACE_STEPS`` | ``0,5``, ``0-3``; default all | steps to trace |
| ``POLYATTN_TRACE_INPUTS`` | ``1`` (default), ``0`` | whether what goes in is recorded too |
| ``POLYATTN_TRACE_OUTPUT`` | a file (``polyattn-trace.jsonl``) | where the trace goes |
| ``POLYATTN_TRACE_OVERWRITE`` | ``0`` (default), ``1`` | whether it replaces an earlier run's |

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
    "steps_of", "variable",
]  # fmt: skip

VARIABLES = (
    "POLYATTN_BACKEND",
    "POLYATTN_ON_UNSUPPORTED",
    "POLYATTN_CACHE_DIR",
    "POLYATTN_TUNING",
    "POLYATTN_PLUGINS",
    "POLYATTN_NATIVE_ISA",
    "POLYATTN_TRACE_ACTIVATIONS",
    "POLYATTN_TRACE_LAYERS",
    "POLYATTN_TRACE_STATS",
    "POLYATTN_TRACE_STEPS",
    "POLYATTN_TRACE_INPUTS",
    "POLYATTN_TRACE_OUTPUT",
    "POLYATTN_TRACE_OVERWRITE",
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
    trace_activations: bool = False
    trace_layers: str | None = None
    trace_stats: tuple[str, ...] | None = None
    trace_steps: frozenset[int] | None = None
    trace_inputs: bool = True
    trace_output: Path = Path("polyattn-trace.jsonl")
    trace_overwrite: bool = False

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
            trace_activations=_choice(environ, "POLYATTN_TRACE_ACTIVATIONS", _OFF + _ON) in _ON,
            trace_layers=environ.get("POLYATTN_TRACE_LAYERS", "").strip() or None,
            trace_stats=_list(environ.get("POLYATTN_TRACE_STATS", "")),
            trace_steps=_steps(environ.get("POLYATTN_TRACE_STEPS", "").strip()),
            trace_inputs=_choice(environ, "POLYATTN_TRACE_INPUTS", _ON + _OFF) in _ON,
            trace_output=_output(environ.get("POLYATTN_TRACE_OUTPUT", "").strip()),
            trace_overwrite=_choice(environ, "POLYATTN_TRACE_OVERWRITE", _OFF + _ON) in _ON,
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


_OFF, _ON = ("0", "false", "no", "off"), ("1", "true", "yes", "on")
_MOST_STEPS = 1_000_000


def _list(value: str) -> tuple[str, ...] | None:
    return tuple(name.strip() for name in value.split(",") if name.strip()) or None


def _output(value: str) -> Path:
    return Path(value).expanduser() if value else Settings.trace_output


def _steps(value: str) -> frozenset[int] | None:
    if not value:
        return None
    try:
        return steps_of(value)
    except ValueError as error:
        raise SettingsError(f"got POLYATTN_TRACE_STEPS={value!r}, {error}") from None


def steps_of(text: str) -> frozenset[int]:
    """Return the steps that a text names: numbers and ranges, with commas between them.

    Raises ValueError for a text that names none, whose message says what was expected.

    >>> sorted(steps_of("0, 5-7"))
    [0, 5, 6, 7]
    """
    found: set[int] = set()
    for part in text.split(","):
        ends = [end.strip() for end in part.split("-")]
        if len(ends) > 2 or not all(end.isascii() and end.isdigit() for end in ends):
            raise ValueError(f"expected steps such as 0,5 or 0-3, and {part.strip()!r} is none.")
        first, last = int(ends[0]), int(ends[-1])
        if last < first or last - first >= _MOST_STEPS:
            raise ValueError(f"expected ranges that ascend, as 0-3, and {part.strip()!r} does not.")
        found.update(range(first, last + 1))
    return frozenset(found)


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


def environment(changes: dict[str, str]) -> dict[str, str]:
    """Return the environment for another process, with `changes`."""
    return dict(os.environ) | changes
