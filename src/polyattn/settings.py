"""The only reader of ``os.environ``: each variable is parsed once, and again when it changes.

A setting is one row of :class:`Settings`: its name is the variable's, its other columns say how it
is read, which values it takes and what it means. ``polyattn doctor`` and the table of
``docs/command-line.md`` come from there.

A value that means nothing is an error that lists the valid ones, never ignored.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from polyattn import epoch
from polyattn.errors import SettingsError, near_matches

__all__ = [
    "BACKEND", "NATIVE_ISAS", "NO_HOME", "VARIABLES", "Settings", "compiler", "current",
    "misspelt_here", "raw", "reload", "rows", "steps_of", "variable", "within",
]  # fmt: skip

NATIVE_ISAS = ("generic", "avx2", "avx512", "avx512bf16", "neon", "amx", "amx_twin")
"""The instruction sets that the native kernels know; which are here, ``polyattn.native`` says."""
NO_HOME = Path(os.devnull, "no home directory")
"""The cache directory where there is no home: nothing can be in it, and notices name it."""


@dataclass(frozen=True)
class _Values:
    """What a variable may hold: how it is read from the environment, and as the docs say it."""

    read: Callable[[Mapping[str, str], str], Any]
    said: str


def _text(environ: Mapping[str, str], variable: str) -> str | None:
    return environ.get(variable, "").strip() or None


def _name(environ: Mapping[str, str], variable: str) -> str | None:
    return (_text(environ, variable) or "").lower() or None


def _list(environ: Mapping[str, str], variable: str) -> tuple[str, ...] | None:
    names = (name.strip() for name in environ.get(variable, "").split(","))
    return tuple(name for name in names if name) or None


def _steps(environ: Mapping[str, str], variable: str) -> frozenset[int] | None:
    value = _text(environ, variable)
    try:
        return None if value is None else steps_of(value)
    except ValueError as error:
        raise SettingsError(f"got {variable}={value!r}, {error}") from None


def _one_of(*valid: str, others: Mapping[str, str] | None = None) -> _Values:
    """Return the words that a variable takes, the default first; `others` are read as these."""
    words = (*valid, *(others or ()))

    def read(environ: Mapping[str, str], variable: str) -> str:
        value = environ.get(variable, "").strip().lower() or valid[0]
        if value not in words:
            raise SettingsError(
                f"got {variable}={environ[variable]!r}, expected one of {', '.join(words)}."
                f"{near_matches(value, words)} Unset it for the default ({valid[0]})."
            )
        return value if others is None else others.get(value, value)

    said = (f"`{word}`" for word in valid[1:])
    return _Values(read, ", ".join((f"`{valid[0]}` (default)", *said)))


def _switch(words: _Values, on: str) -> _Values:
    return _Values(lambda environ, variable: words.read(environ, variable) == on, words.said)


def _expanded(path: str, variable: str) -> Path:
    try:
        return Path(path).expanduser()
    except RecursionError:
        raise
    except RuntimeError as error:  # a user that is not here, or one without a home
        raise SettingsError(
            f"got {variable}={path!r}, expected a path whose ~ is a home directory, and it is none "
            f"here ({str(error).rstrip('.')}); write the path without ~."
        ) from None


def _path(default: str) -> _Values:
    def read(environ: Mapping[str, str], variable: str) -> Path:
        return _expanded(_text(environ, variable) or default, variable)

    return _Values(read, f"a file; default `{default}`")


def _cache_dir(environ: Mapping[str, str], variable: str) -> Path:
    named = _text(environ, variable)
    if named:
        return _expanded(named, variable)
    if sys.platform == "win32" and environ.get("LOCALAPPDATA"):
        return Path(environ["LOCALAPPDATA"]) / "polyattn"
    if sys.platform != "darwin" and environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "polyattn"
    try:
        home = Path(environ.get("HOME") or "~").expanduser()
    except RecursionError:  # or the table would be in memory for good
        raise
    except RuntimeError:  # HOME is not set, and the user is in no list, as in some containers
        return NO_HOME
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "polyattn"
    return home / ".cache" / "polyattn"


_BACKEND = _Values(_name, "a backend's name")
_REFUSED = _one_of("error", "fallback")
_CACHE = _Values(_cache_dir, "a directory; default the user's cache directory")
_SYNONYMS = {"false": "0", "no": "0", "off": "0", "true": "1", "yes": "1", "on": "1"}
_WORDS = {"0": "off", "false": "off", "no": "off", "1": "on", "true": "on", "yes": "on"}
_ON_OFF = _switch(_one_of("on", "off", others=_WORDS), "on")
_OFF_ON = _switch(_one_of("0", "1", others=_SYNONYMS), "1")
_ONE_ZERO = _switch(_one_of("1", "0", others=_SYNONYMS), "1")
_PATTERN = _Values(_text, "a regular expression; default all")
_NAMES = _Values(_list, "names, as `abs_mean,max`; default all")
_STEPS = _Values(_steps, "`0,5`, `0-3`; default all")


def _setting(values: _Values, about: str) -> Any:
    return field(metadata={"values": values, "about": about})


@dataclass(frozen=True)
class Settings:
    """What the environment asks for: a row here is a setting, ``POLYATTN_`` before its name.

    >>> Settings.parse({"POLYATTN_BACKEND": "flex"}).backend
    'flex'
    """

    backend: str | None = _setting(_BACKEND, "request this backend everywhere (source `ENV`)")
    on_unsupported: str = _setting(
        _one_of("error", "fallback"), "what a request that cannot be met does"
    )
    cache_dir: Path = _setting(_CACHE, "where the tuning table lives")  # noqa: RUF009
    tuning: bool = _setting(_ON_OFF, "whether measured times take part")
    calibration: bool = _setting(
        _ON_OFF,
        "whether an unknown processor is calibrated, some tens of milliseconds for a dtype, once",
    )
    plugins: bool = _setting(_ON_OFF, "whether backends of other packages are loaded")
    native_isa: str = _setting(_one_of("best", *NATIVE_ISAS), "instruction set of `native_cpu`")
    pallas_interpret: bool = _setting(
        _OFF_ON, "whether `pallas` runs on CPUs, interpreted: for tests, and slow"
    )
    trace_activations: bool = _setting(_OFF_ON, "whether models are traced")
    trace_layers: str | None = _setting(_PATTERN, "modules to trace, by name")
    trace_stats: tuple[str, ...] | None = _setting(_NAMES, "what to keep of a tensor")
    trace_steps: frozenset[int] | None = _setting(_STEPS, "steps to trace")
    trace_inputs: bool = _setting(_ONE_ZERO, "whether what goes in is recorded too")
    trace_output: Path = _setting(_path("polyattn-trace.jsonl"), "where the trace goes")  # noqa: RUF009
    trace_overwrite: bool = _setting(_OFF_ON, "whether it replaces an earlier run's")

    @classmethod
    def parse(cls, environ: Mapping[str, str]) -> Settings:
        """Read the variables from `environ`; raise :class:`SettingsError` for a bad value."""
        return cls(
            **{
                row.name: row.metadata["values"].read(environ, _variable(row.name))
                for row in fields(cls)
            }
        )

    def shown(self) -> dict[str, str | None]:
        """Return every variable's value as one would set it; None for one that has none."""
        return {_variable(row.name): _shown(getattr(self, row.name)) for row in fields(self)}


def _variable(name: str) -> str:
    return f"POLYATTN_{name.upper()}"


def _shown(value: object) -> str | None:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, frozenset | tuple):
        return ",".join(map(str, sorted(value) if isinstance(value, frozenset) else value))
    return None if value is None else str(value)


VARIABLES = tuple(_variable(row.name) for row in fields(Settings))


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """Say which variables are no settings and look like one: nothing reads them.

    >>> misspelt({"POLYATTN_TUNNING": "off", "POLYATTN_OF_OTHERS": "1"})
    ["got POLYATTN_TUNNING, which is no setting. Did you mean 'POLYATTN_TUNING'?"]
    """
    known = {row.name: _variable(row.name) for row in fields(Settings)}
    said = []
    for name in sorted(environ):
        if not name.upper().startswith("POLYATTN_") or name in VARIABLES:
            continue
        bare = name.lower().removeprefix("polyattn_")
        close = difflib.get_close_matches(bare, known, n=1, cutoff=0.7)
        if close:
            said.append(f"got {name}, which is no setting. Did you mean {known[close[0]]!r}?")
    return said


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield each setting's variable, its values and its meaning, in Markdown.

    >>> next(rows())
    ('POLYATTN_BACKEND', "a backend's name", 'request this backend everywhere (source `ENV`)')
    """
    for row in fields(Settings):
        yield _variable(row.name), row.metadata["values"].said, row.metadata["about"]


_MOST_STEPS = 1_000_000


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
_read: tuple[object, ...] = ()
_KEYS = tuple(map(_key, VARIABLES))


def current() -> Settings:
    """Return the settings; they are parsed again only when a variable has changed."""
    global _current, _read
    found = tuple(map(raw, _KEYS))
    if _current is None or found != _read:
        known = _current is not None
        _current, _read = Settings.parse(os.environ), found
        if known:
            epoch.invalidate()
    return _current


def misspelt_here() -> list[str]:
    """Say of the environment what :func:`misspelt` finds."""
    return misspelt(os.environ)


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
    epoch.invalidate()
    return settings


@contextmanager
def within(changes: Mapping[str, str]) -> Iterator[Settings]:
    """Run a block under other variables, as if they had been set before the program.

    For programs that measure, in one thread: the environment belongs to the whole process.

    >>> with within({"POLYATTN_TUNING": "off"}) as settings:
    ...     settings.tuning
    False
    """
    before = {name: os.environ.get(name) for name in changes}
    try:
        os.environ.update(changes)
        yield reload()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        reload()


def environment(changes: dict[str, str]) -> dict[str, str]:
    """Return the environment for another process, with `changes`."""
    return dict(os.environ) | changes
