"""Setting torch's knobs: in a scope that is undone exactly, or for good from a snapshot."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

from polyattn.errors import FlagsError
from polyattn.flags import snapshot as snapshots
from polyattn.flags.cells import Access
from polyattn.flags.knob import check_value
from polyattn.flags.stack import Change, Entry, Stack
from polyattn.selection.decorated import iterate
from polyattn.torch.flags import tables
from polyattn.torch.flags.tables import access

__all__ = ["FlagScope", "apply", "flags"]

OnConflict = Literal["warn", "refuse", "allow"]
_ON_CONFLICT = ("warn", "refuse", "allow")

_stack = Stack()


def flags(
    changes: Mapping[str, Any] | None = None, /, *, on_conflict: OnConflict = "warn", **named: Any
) -> FlagScope:
    """Return a scope in which the named knobs have the given values, and no others change.

    Names are those of :func:`table`, as keywords or in a dictionary; torch's full paths are
    accepted. On every exit what was there is put back exactly, with whatever a setting changed
    besides its own name, also when scopes of several threads end in any order. Usable with
    ``with``, as a decorator, and again after it ended.

    Nearly all of torch's knobs are for the whole process. When another thread or task holds
    another value, entering warns with :class:`FlagsConflictWarning`; ``on_conflict="refuse"`` makes
    that an error, ``"allow"`` silences it.

    Graphs that ``torch.compile`` made before are guarded by torch against some knobs and not
    against others (SDPA's switches among them); enter scopes outside compiled functions.

    Raises FlagsError, with nothing set: an unknown knob, a wrong type or value, a knob that this
    build does not have or that is frozen, values that contradict each other.

    >>> import torch
    >>> with flags(**{"cuda.matmul.allow_tf32": True, "num_threads": 1}):
    ...     torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
    (True, 'high')
    >>> torch.get_float32_matmul_precision()
    'highest'
    """
    if changes is not None and not isinstance(changes, Mapping):
        raise FlagsError(
            f"got flags({changes!r}), expected knobs and values: flags(num_threads=1) or "
            "flags({'cudnn.benchmark': True})."
        )
    return FlagScope({**(changes or {}), **named}, on_conflict)


class FlagScope(contextlib.ContextDecorator):
    """What :func:`flags` returns. `changes` holds the knobs by their names in the table."""

    def __init__(self, changes: Mapping[str, Any], on_conflict: OnConflict = "warn") -> None:
        if on_conflict not in _ON_CONFLICT:
            raise FlagsError(
                f"got on_conflict={on_conflict!r}, expected one of {', '.join(_ON_CONFLICT)}."
            )
        self._on_conflict = on_conflict
        self._entries: dict[int, list[Entry]] = {}
        self._asked: list[Change] = []
        for name, value in changes.items():
            one = access(name)
            if any(one is other for other, _ in self._asked):
                raise FlagsError(f"got {one.knob.name} twice, expected it once.", one.knob.name)
            taken(one, value)
            self._asked.append((one, value))

    @property
    def changes(self) -> dict[str, Any]:
        """The knobs that the scope sets."""
        return {one.knob.name: value for one, value in self._taken()}

    def _taken(self) -> list[Change]:
        """The knobs, with values as taken now: an order of kernels depends on the moment."""
        return [(one, taken(one, value)) for one, value in self._asked]

    def __repr__(self) -> str:
        inner = ", ".join(f"{name!r}: {value!r}" for name, value in self.changes.items())
        return f"flags(**{{{inner}}})"

    def _recreate_cm(self) -> FlagScope:
        """Give each call of a decorated function, in whatever thread, a scope of its own."""
        asked = {one.knob.name: value for one, value in self._asked}
        return FlagScope(asked, self._on_conflict)

    def __call__(self, function: Any) -> Any:
        """Decorate a function; coroutines and generators are covered while they run."""
        if inspect.isasyncgenfunction(function):
            raise FlagsError(
                f"got the asynchronous generator {function.__name__} to decorate, expected a "
                "function, a generator or a coroutine; enter the scope inside it with `with`."
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with self._recreate_cm():
                    return await function(*args, **kwargs)

            return awaited
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def iterated(*args: Any, **kwargs: Any) -> Any:
                return iterate(function(*args, **kwargs), self._recreate_cm)

            return iterated
        return super().__call__(function)

    def __enter__(self) -> FlagScope:
        entry = _stack.enter(self._taken(), self._on_conflict)
        try:
            self._entries.setdefault(threading.get_ident(), []).append(entry)
            return self
        except BaseException:
            _stack.leave(entry)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        mine = self._entries.get(threading.get_ident())
        others = next((entries for entries in self._entries.values() if entries), None)
        if not mine and not others:
            raise FlagsError("got the end of a scope that was not entered.")
        _stack.leave((mine or others or []).pop())


def taken(one: Access, value: Any) -> Any:
    """Return `value` as the knob takes it, or raise FlagsError that says why it does not."""
    knob = one.knob
    if knob.kind != "knob":
        raise FlagsError(f"got {knob.name}={value!r}, which is not set: {one.lacks()}.", knob.name)
    value = one.convert(value)
    if one.write is not None:  # what a build lacks altogether is said before what is wrong with it
        value = check_value(knob, value)
    if lacking := one.lacks(value):
        raise FlagsError(f"got {knob.name}={value!r}, which cannot be set: {lacking}.", knob.name)
    return value


def apply(snapshot: Mapping[str, Any], *, strict: bool = True) -> dict[str, tuple[Any, Any]]:
    """Make torch stand as a snapshot says, for good; return what changed, as :func:`diff` does.

    Only knobs whose values differ are set, those of a thread in the calling thread. Facts of the
    build and the environment are not compared, and a value of None (a knob that was not there) asks
    for nothing. A knob that differs and cannot be set here (another build, frozen, a name that this
    torch does not know) is an error and nothing is set; with ``strict=False`` it is left as it is.
    Scopes in force put back what was before them when they end, whatever was applied meanwhile.

    >>> import torch
    >>> from polyattn.torch.flags import snapshot
    >>> before = snapshot()
    >>> torch.backends.cudnn.benchmark = True
    >>> apply(before)
    {'cudnn.benchmark': (True, False)}
    """
    wanted = snapshots.check(snapshot)
    framework = wanted[snapshots.META]["framework"]
    if framework != "torch":
        raise FlagsError(f"got a snapshot of {framework}, expected one of torch.")
    now = tables.snapshot()
    changes, left = _to_settle(now, wanted)
    if left and strict:
        raise FlagsError(
            f"{len(left)} of the snapshot's knobs cannot be set here, and nothing was: "
            f"{' '.join(left)} strict=False leaves them as they are."
        )
    _stack.settle(changes, lambda: _unlike(wanted) if strict else "")
    return snapshots.diff(now, tables.snapshot())


_DERIVED = {"cuda.matmul.allow_tf32", "deterministic_debug_mode"}
"""Old names of what other knobs hold whole."""


def _to_settle(
    now: snapshots.Snapshot, wanted: snapshots.Snapshot
) -> tuple[list[Change], list[str]]:
    """The knobs to set, and why others that differ cannot be."""
    changes, left = [], []
    for name in _touched(now, wanted):
        known = tables.accesses().get(name)
        if known is None:
            left.append(f"{name!r} is not a knob of this torch.")
        elif known.knob.kind == "knob" and wanted[name] is not None and name not in _DERIVED:
            try:
                changes.append((known, taken(known, wanted[name])))
            except FlagsError as error:
                if now.get(name) != wanted[name]:
                    left.append(str(error))
    return changes, left


def _touched(now: snapshots.Snapshot, wanted: snapshots.Snapshot) -> list[str]:
    """The knobs that differ, and those that change with them, and so on."""
    found = [name for name in snapshots.diff(now, wanted) if name in wanted]
    for name in found:  # it grows meanwhile
        known = tables.accesses().get(name)
        coupled = known.knob.couples if known and known.knob.kind == "knob" else ()
        found += [other for other in coupled if other in wanted and other not in found]
    return found


def _unlike(wanted: snapshots.Snapshot) -> str:
    """Say which knob does not stand as wanted; empty when all do."""
    for name, one in tables.accesses().items():
        if one.knob.kind != "knob" or one.knob.volatile or wanted.get(name) is None:
            continue
        found, why = tables.read(one)
        if found != wanted[name]:
            reads = why or repr(found)
            return f"got a snapshot with {name}={wanted[name]!r}, which then reads as {reads}."
    return ""
