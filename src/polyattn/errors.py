"""Every error that polyattn raises on purpose.

::

    PolyattnError
    ├── InvalidProblem      (ValueError)    the call itself is wrong: shapes, dtypes, options
    ├── UnknownBackend      (ValueError)    a name that nothing registered answers to
    ├── Unsupported         (RuntimeError)  who was asked for cannot run it; see `decisions`
    ├── MissingDependency   (ImportError)   a package that is needed is not installed
    ├── SettingsError       (ValueError)    an environment variable holds a value that means nothing
    ├── TuningError         (ValueError)    a tuning or record file that cannot be read
    ├── FlagsError          (ValueError)    a knob or snapshot of a framework: not as asked
    ├── HookError           (ValueError)    a hook that cannot be attached, or that misbehaved
    ├── TraceError
    └── OffloadError

A message says what was got, what was expected and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "FlagsError",
    "HookError",
    "InvalidProblem",
    "MissingDependency",
    "OffloadError",
    "PolyattnError",
    "SettingsError",
    "TraceError",
    "TuningError",
    "UnknownBackend",
    "Unsupported",
]


class PolyattnError(Exception):
    """The base of all errors of this package."""


class InvalidProblem(PolyattnError, ValueError):
    """The call is wrong in itself: no backend could run it."""


class UnknownBackend(PolyattnError, ValueError):
    """A backend name that is not registered; the message lists near matches and all names.

    >>> raise UnknownBackend.named("sdpa_flsh", ["sdpa_flash", "flex"], asked_by="backend=")
    Traceback (most recent call last):
      ...
    polyattn.errors.UnknownBackend: got backend= 'sdpa_flsh', which no backend is called. \
Did you mean 'sdpa_flash'? Registered: flex, sdpa_flash.
    """

    @classmethod
    def named(cls, name: object, known: Iterable[str], *, asked_by: str) -> UnknownBackend:
        """Build the error for `name`, asked for by `asked_by` (an argument or a variable)."""
        names = sorted(known)
        return cls(
            f"got {asked_by} {name!r}, which no backend is called.{near_matches(name, names)} "
            f"Registered: {', '.join(names) or 'none'}."
        )


class Unsupported(PolyattnError, RuntimeError):
    """The requested backend, or every one, cannot run the problem.

    `decisions` maps each backend's name to what was decided about it and why.
    """

    def __init__(self, message: str, decisions: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.decisions: dict[str, Any] = dict(decisions or {})


class FlagsError(PolyattnError, ValueError):
    """A knob of a framework that is unknown, not in this build, frozen or cannot take the value.

    Nothing was set. `knob` is its name, where one knob is at fault.
    """

    def __init__(self, message: str, knob: str | None = None) -> None:
        super().__init__(message)
        self.knob = knob


class MissingDependency(PolyattnError, ImportError):
    """A package that the request needs is not installed; the message says how to get it."""


class SettingsError(PolyattnError, ValueError):
    """An environment variable of polyattn holds a value that means nothing."""


class TuningError(PolyattnError, ValueError):
    """A tuning or record file that is corrupt, foreign or of another schema."""


class HookError(PolyattnError, ValueError):
    """A hook that cannot be attached as asked, or that returned what no module call can take."""


class TraceError(PolyattnError):
    """An activation trace that cannot be written, read or compared."""


class OffloadError(PolyattnError):
    """A model that cannot be offloaded as asked."""


def near_matches(name: object, known: Iterable[str]) -> str:
    """Return `` Did you mean ...?`` for a misspelt `name`, or an empty string.

    >>> near_matches("Flex ", ["flex", "reference"])
    " Did you mean 'flex'?"
    """
    cleaned = str(name).strip().lower().replace("-", "_")
    close = difflib.get_close_matches(cleaned, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
