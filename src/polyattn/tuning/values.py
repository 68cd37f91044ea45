"""What the tuning table holds: a `Key`, and a `Measurement` of one backend for that key.

Both are checked when they are made, so every value that exists is valid. Reading a row of a file,
or of a JSON export, goes through the same constructors.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import reprlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from polyattn.errors import TuningError

_SHORT = reprlib.Repr()
_SHORT.maxstring = 80
_MAX_REPEATS = 2**31 - 1
_DIGEST = re.compile(r"[0-9a-f]{64}")


def refuse(what: str, got: object, expected: str, advice: str) -> TuningError:
    """The error for a value that cannot be used: what it got, what it expected, what to do.

    >>> str(refuse("median_s", -1.0, "a positive number of seconds", "measure again"))
    'median_s: got -1.0; expected a positive number of seconds; measure again'
    """
    return TuningError(f"{what}: got {_SHORT.repr(got)}; expected {expected}; {advice}")


def utc_now() -> str:
    """The time now as ISO 8601 text in UTC, the form of `Measurement.measured_at`."""
    return datetime.now(UTC).isoformat()


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Key:
    """What a measured time holds for: the device, the library versions and the problem class.

    All three are plain text, made by the caller and compared as they are. `problem` is the
    canonical JSON of the problem class; forward alone and forward with backward are two classes.

    >>> Key("cpu:x86-64 avx2 2 threads", "polyattn=0.1.0 torch=2.13.0", '{"T":128}').versions
    'polyattn=0.1.0 torch=2.13.0'
    >>> Key("", "polyattn=0.1.0", "{}")
    Traceback (most recent call last):
    polyattn.errors.TuningError: Key.device: got ''; expected text that is not empty; \
describe the device, for example 'cpu:x86-64 avx2 2 threads'
    """

    device: str
    versions: str
    problem: str

    def __post_init__(self) -> None:
        _check_text(
            "Key.device",
            self.device,
            "describe the device, for example 'cpu:x86-64 avx2 2 threads'",
        )
        _check_text(
            "Key.versions",
            self.versions,
            "list the libraries, for example 'polyattn=0.1.0 torch=2.13.0'",
        )
        _check_text("Key.problem", self.problem, "pass the canonical JSON of the problem class")


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """The measured time of one backend in one configuration, and how right its result was.

    `error` is the distance to the float64 reference and `tolerance` what was allowed; `verified`
    says that the check passed. What is not verified can be stored and shown, but is never a best
    choice; only there `error` may be infinite (the result held NaN, or there was none).
    `config` is brought to canonical JSON, so that equal configurations are equal text. `flags` is
    the digest of the snapshot of the framework's flags in force; empty where it was not recorded.

    >>> one = Measurement("sdpa_flash", '{"b": 1, "a": 2}', 2e-5, 1e-5, 3e-5, 20, 0.0, 1e-6, True)
    >>> one.config
    '{"a":2,"b":1}'
    >>> Measurement("sdpa_flash", "{}", 2e-5, 1e-5, 3e-5, 20, 0.5, 1e-6, True)
    Traceback (most recent call last):
    polyattn.errors.TuningError: Measurement.verified: got True with error 0.5 above tolerance \
1e-06; expected error <= tolerance; store it with verified=False
    """

    backend: str
    config: str
    median_s: float
    min_s: float
    max_s: float
    repeats: int
    error: float
    tolerance: float
    verified: bool
    measured_at: str = dataclasses.field(default_factory=utc_now)
    flags: str = ""

    def __post_init__(self) -> None:
        _check_text(
            "Measurement.backend", self.backend, "name the backend, for example 'sdpa_flash'"
        )
        if self.config != "{}":  # most rows: a look-up of times is spared the parsing
            object.__setattr__(self, "config", _canonical_config(self.config))
        _check_type("Measurement.verified", self.verified, bool)
        _check_type("Measurement.repeats", self.repeats, int)
        if not 1 <= self.repeats <= _MAX_REPEATS:
            raise refuse(
                "Measurement.repeats", self.repeats, f"1 to {_MAX_REPEATS}", "count the timed runs"
            )
        for name in ("median_s", "min_s", "max_s"):
            self._normalise(
                name, lambda x: 0.0 < x < math.inf, "a positive, finite number of seconds"
            )
        self._normalise("tolerance", lambda x: 0.0 <= x < math.inf, "a finite number, zero or more")
        self._check_error()
        if not self.min_s <= self.median_s <= self.max_s:
            got = f"{self.min_s!r}, {self.median_s!r}, {self.max_s!r}"
            raise TuningError(
                f"Measurement: got min, median, max = {got}; expected rising order; "
                "take them from the same times"
            )
        instant(self.measured_at)
        _check_type("Measurement.flags", self.flags, str)
        if self.flags and not _DIGEST.fullmatch(self.flags):
            raise refuse(
                "Measurement.flags", self.flags, "a digest or nothing", "pass flags to record()"
            )

    def _normalise(self, name: str, allowed: Callable[[float], bool], expected: str) -> None:
        """Check a number and store it as a float without a negative zero (SQLite keeps none)."""
        value = getattr(self, name)
        what = f"Measurement.{name}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refuse(what, value, expected, f"pass a float, not {type(value).__name__}")
        try:
            number = float(value) + 0.0
        except OverflowError:
            number = math.inf
        if not allowed(number):
            raise refuse(what, value, expected, "measure again")
        object.__setattr__(self, name, number)

    def _check_error(self) -> None:
        if not self.verified:
            self._normalise(
                "error", lambda x: x >= 0.0, "a number that is zero or more, or infinity"
            )
            return
        self._normalise("error", lambda x: 0.0 <= x < math.inf, "a finite number, zero or more")
        if self.error > self.tolerance:
            raise TuningError(
                f"Measurement.verified: got True with error {self.error!r} above tolerance "
                f"{self.tolerance!r}; expected error <= tolerance; store it with verified=False"
            )


def instant(text: str) -> datetime:
    """The point in time that an ISO 8601 text in UTC names.

    >>> instant("2026-01-31T12:00:00Z") == instant("2026-01-31T12:00:00.000000+00:00")
    True
    """
    _check_text("measured_at", text, "pass ISO 8601 text in UTC")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.utcoffset() != timedelta(0):
        raise refuse(
            "measured_at",
            text,
            "ISO 8601 in UTC, as '2026-01-31T12:00:00+00:00'",
            "convert it to UTC",
        )
    return moment


def canonical_json(what: str, text: str) -> str:
    """The one spelling of a JSON text: sorted keys, no blanks, ASCII, no NaN, no repeated names.

    >>> canonical_json("config", '{"b": [1, 2], "a": null}')
    '{"a":null,"b":[1,2]}'
    """
    _check_text(what, text, 'pass JSON text, for example "{}"')
    try:
        return json.dumps(strict_json(text), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise refuse(what, text, f"JSON ({error})", "write it with json.dumps") from None


def _canonical_config(text: str) -> str:
    """Each call that finds the row makes a mapping of it: nothing else may stand there."""
    config = canonical_json("Measurement.config", text)
    if not config.startswith("{"):
        raise refuse("Measurement.config", text, "a JSON object", 'pass "{}" for none')
    return config


def strict_json(text: str) -> object:
    """Decode JSON; NaN, Infinity and a name that occurs twice are a ValueError."""
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object names one member twice")
    return members


def _check_type(what: str, value: object, kind: type) -> None:
    if type(value) is not kind:
        raise refuse(
            what, value, f"{kind.__name__}", f"pass {kind.__name__}, not {type(value).__name__}"
        )


def _check_text(what: str, value: object, advice: str) -> None:
    if not isinstance(value, str):
        raise refuse(what, value, "text", advice)
    if not value.strip():
        raise refuse(what, value, "text that is not empty", advice)
    if "\0" in value or not _is_utf8(value):
        raise refuse(what, value, "text that UTF-8 can hold, without NUL", advice)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
