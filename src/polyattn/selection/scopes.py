"""Who asked for what, where: scopes, module policies, the forced backend, and the recorder.

The truth of a scope is a ``ContextVar``, so nesting, exceptions, threads and asyncio tasks are
right by construction. ``torch.compile`` cannot trace ``ContextVar.get``, but it resolves and
guards properties whose getter is a C function, and the bound method ``ContextVar.get`` is one:
``state.scope`` therefore reads the variable, is guarded, and never goes stale. Its argument,
``state`` itself, is what ``get`` returns when the variable is unset.

What is set inside a traced frame (a ``with use_backend(...)`` in a model's forward, or a module
policy's hook) lives in a ``threading.local``, whose attributes the compiler tracks and guards.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar, Token
from types import CodeType
from typing import Any, NamedTuple

from polyattn.epoch import invalidate, listeners, lock

__all__ = [
    "Ambient",
    "arm",
    "ask",
    "begin",
    "current_scope",
    "end",
    "enter",
    "entered_by_coroutine",
    "invalidate",
    "leave",
    "listeners",
    "local",
    "lock",
    "put_back",
    "record",
    "recorded",
    "recorder",
    "recorders",
    "recording",
    "scope",
    "set_forced",
    "state",
    "suspendable",
    "tell",
    "tell_armed",
    "watchers",
]

scope: ContextVar[str] = ContextVar("polyattn_scope")
"""The encoded scope in force (see `polyattn.selection.requests`); unset or empty outside of any."""

recording: ContextVar[Any] = ContextVar("polyattn_recording")
"""The lists that selections are recorded in, outermost first; unset or empty outside of any."""

recorder: ContextVar[int] = ContextVar("polyattn_recorder", default=0)
"""The number of the innermost recorder; 0 outside of any."""

_OURS = (__name__, "polyattn.selection.requests")
_epochs, recorders = itertools.count(1), itertools.count(1)

recorded: ContextVar[str] = ContextVar("polyattn_recorded")
"""Text that is not empty while selections are recorded: what compiled code guards."""

suspendable: ContextVar[bool] = ContextVar("polyattn_suspendable", default=False)
"""Whether a coroutine entered what is in force here: while it awaits, others run in its thread."""


class _Saved(NamedTuple):
    """What was in force before a scope. `in_turn`: whether its token leads there."""

    owner: object
    token: Token[str]
    outer: str
    traced: str | None
    noted: tuple[bool, bool]
    in_turn: bool = True


_saved: ContextVar[tuple[_Saved, ...]] = ContextVar("polyattn_saved", default=())


class Ambient:
    """What a call reads of its surroundings; every attribute can be guarded by a compiler."""

    scope = property(scope.get)
    recorded = property(recorded.get)

    def __init__(self) -> None:
        self.epoch = "0"  # text, which compilers never take for a symbolic size
        self.forced: str | None = None
        self.armed = False  # whether calls have to look around for requests and recorders
        self.asked = False  # whether anything was ever asked for: recomputations must know
        self.recorders = 0


class Local(threading.local):
    """What traced frames set: the module policy, and scopes entered under a compiler.

    Attributes of the instance, not defaults of the class: a compiler looks those up statically.
    """

    def __init__(self) -> None:
        self.module: str | None = None
        self.traced: str | None = None


scope.set("")  # so that compiled code of this context guards a text in any case
recorded.set("")
state = Ambient()
local = Local()
is_tracing: Callable[[], bool] = lambda: False  # noqa: E731 - a front-end replaces it
call_code: Callable[[], CodeType | None] = lambda: None  # noqa: E731 - that of calls of modules
_armed: list[Callable[[bool], None]] = []
watchers: list[Callable[[int, bool], None]] = []
"""What is called when a scope or a recorder begins or ends here, for caches that are no guards."""


def tell(change: int, by_coroutine: bool) -> None:
    """Tell the watchers that a scope or a recorder begins (1) or ends (-1) here.

    `by_coroutine`: whether code that can be suspended has it; other code may then run in the same
    thread before it ends.
    """
    for watch in watchers:
        watch(change, by_coroutine)


def entered_by_coroutine() -> bool:
    """Return whether what enters a scope now may be suspended while it is in force.

    It may where the frame is a coroutine's, or a generator's within an event loop. Only where
    somebody watches: others read the context itself.
    """
    if not watchers:
        return False
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__") in (*_OURS, "contextlib"):
        frame = frame.f_back
    flags = frame.f_code.co_flags
    if flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE):
        return True
    return bool(flags & inspect.CO_GENERATOR) and _in_event_loop()


def _in_event_loop() -> bool:
    if (loops := sys.modules.get("asyncio")) is None:
        return False
    try:
        loops.get_running_loop()
    except RuntimeError:
        return False
    return True


def _begin_epoch() -> None:
    state.epoch = str(next(_epochs))


listeners.insert(0, _begin_epoch)


def arm(on: bool) -> None:
    """Have calls look around for requests and recorders, or not."""
    state.armed = on
    for hear in _armed:
        hear(on)


def tell_armed(hear: Callable[[bool], None]) -> None:
    """Have a function called with ``state.armed``, now and when it is set: for code of extensions.

    To read an attribute of Python costs these a fifth of a call's way.
    """
    with lock:
        _armed.append(hear)
        hear(state.armed)


def ask() -> None:
    """Note that something is asked for; from now on every call looks around."""
    state.asked = True
    if not state.armed:
        with lock:
            arm(True)


def record(count: int) -> None:
    """Note that a recorder begins (1) or ends (-1)."""
    with lock:
        state.recorders += count
        arm(state.asked or state.recorders > 0)


def set_forced(name: str | None) -> None:
    """Force a backend for the whole process, all threads; None returns to automatic."""
    ask()
    state.forced = name
    invalidate()


def current_scope() -> str | None:
    """Return the encoded scope in force here, or None."""
    if local.traced is not None:
        return local.traced or None
    found = state.scope
    return None if found is state else found or None


def enter(encoded: str, owner: object) -> str | None:
    """Put a scope of `owner` in force until :func:`leave`.

    Returns what a traced frame has to restore.
    """
    before = local.traced
    if is_tracing():
        local.traced = encoded
        return before
    ask()
    local.traced = None
    outer = scope.get("")
    token = scope.set(encoded)
    try:
        _saved.set((*_saved.get(), _Saved(owner, token, outer, before, begin())))
    except BaseException:  # an interrupt
        scope.set(outer)
        local.traced = before
        raise
    return None


def leave(before: str | None, owner: object) -> None:
    """Restore what was in force before the last scope of `owner`; `before`: in a traced frame."""
    if is_tracing():
        local.traced = before
        return
    saved = _saved.get()
    place = max((n for n, one in enumerate(saved) if one.owner is owner), default=None)
    if place is None:  # a generator that is closed in another context than it was entered in
        tell(-1, entered_by_coroutine())
        return
    mine = saved[place]
    if place + 1 < len(saved):  # a generator that is closed within a later scope, which stays
        later = saved[place + 1]
        noted = mine.noted[0], later.noted[1]
        later = later._replace(outer=mine.outer, traced=mine.traced, noted=noted, in_turn=False)
        _saved.set((*saved[:place], later, *saved[place + 2 :]))
        tell(-1, mine.noted[1])
        return
    local.traced = mine.traced
    # unset again, not empty: compiled code guards the difference
    put_back(scope, mine.token if mine.in_turn else None, mine.outer)
    _saved.set(saved[:-1])
    end(mine.noted)


def put_back(variable: ContextVar[Any], token: Token[Any] | None, otherwise: Any) -> None:
    """Undo a setting; by `otherwise` where its token is of no use.

    So in a copied context, whose tokens belong to the one that it was copied from.
    """
    try:
        if token is not None:
            variable.reset(token)
            return
    except (ValueError, RuntimeError):  # of another context; used, before an interrupt
        pass
    variable.set(otherwise)


def begin() -> tuple[bool, bool]:
    """Note that a scope or a recorder begins here; returns what :func:`end` takes."""
    before, mine = suspendable.get(), entered_by_coroutine()
    suspendable.set(mine)
    tell(1, mine)
    return before, mine


def end(noted: tuple[bool, bool]) -> None:
    """Note that it ends."""
    before, mine = noted
    suspendable.set(before)
    tell(-1, mine)
