"""What is asked for around a call, as a part of the key of JAX's caches.

``jax.jit`` keeps what it traced. A scope, a forced backend, a newly registered one or a measured
time may all change what a call runs on, so each is part of the key: code that was traced under
another is traced again, never run. ``jax.make_user_context`` is JAX's means for that.

A scope lives in a ``ContextVar``, JAX's key in the thread. They differ where a coroutine has a
scope and awaits: other tasks run in its thread then, and threads that it starts have its context.
While there is such a scope, the key is one under which nothing was ever traced, a new one after
each trace: so others trace again, and traced calls within the scope are refused (:func:`check`).
The scopes of functions, which nothing interrupts, JAX can follow.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from polyattn import epoch, settings
from polyattn.errors import InvalidProblem
from polyattn.selection import scopes

__all__ = ["check", "settled", "spread_here", "within_spread"]

Choice = TypeVar("Choice")

_NOTHING = "\n0"
_TRIES = 8
_scope = jax.make_user_context(_NOTHING)
_epoch = jax.make_user_context("")
_spread = jax.make_user_context(None)
_lock, _fresh = threading.Lock(), itertools.count(1)


class _Held:
    """How many scopes coroutines have, of all threads, and the key meanwhile."""

    count = 0
    key = ""


class _Thread(threading.local):
    """What functions of this thread have entered: how many scopes, and JAX's key before them.

    `outside`: how many there were when a coroutine's scope hid them.
    """

    depth = 0
    outside = 0
    first: Any = None


_thread = _Thread()


def _here() -> str:
    """Return what is asked for here, and who records it: each recorder sees code traced anew."""
    return f"{scopes.current_scope() or ''}\n{scopes.recorder.get()}"


def _follow(change: int, by_coroutine: bool) -> None:
    """Make JAX's key what is asked for here; see :data:`polyattn.selection.scopes.watchers`."""
    if by_coroutine:
        with _lock:
            if _Held.count == 0:
                _thread.outside = _thread.depth
            _Held.count += change
    else:
        _enter_or_leave(change)
    if by_coroutine or _Held.count:
        _renew()
    if not by_coroutine:
        return
    if _Held.count == 0 and _thread.depth:
        _scope(_here()).__enter__()


def _enter_or_leave(change: int) -> None:
    if change > 0 and _thread.depth == 0:
        _thread.first = _scope(_here())
        _thread.first.__enter__()
    elif change > 0 or _thread.depth > 1:
        _scope(_here()).__enter__()
    elif _thread.first is not None:
        _thread.first.__exit__(None, None, None)
        _thread.first = None
    _thread.depth = max(_thread.depth + change, 0)


def _renew() -> None:
    """Make the key of all threads one that nothing was traced under, where coroutines have scopes.

    A function's scope keeps its own: nothing else can run in its thread before it ends.
    """
    with _lock:
        _Held.key = f"\n\n{next(_fresh)}" if _Held.count else _NOTHING
        _set_everywhere(_scope, _Held.key)
    if _Held.count and 0 < _thread.depth <= _thread.outside:
        _scope(_Held.key).__enter__()


class _Chosen:
    """Whether anything was chosen under the epoch that is in JAX's key, and may be in a trace."""

    anything = False


def settled(choose: Callable[[str], Choice]) -> Choice:
    """Return what is chosen in an epoch, whose name `choose` gets, that has not ended meanwhile.

    Until something was chosen an epoch's end changes no trace, and JAX's key stays. So the first
    call of a process, which finds backends, settings and measured times and ends an epoch with
    each, is traced once.
    """
    for _ in range(_TRIES):
        settings.current()  # notices variables that have changed
        now = scopes.state.epoch
        try:
            found = choose(now)
        except Exception:  # a program may catch it and go another way, which is a choice too
            if _is_still(now):
                raise
            continue
        if _is_still(now):
            return found
    with epoch.lock:  # something ends epochs all the time
        _Chosen.anything = True
        return choose(scopes.state.epoch)


def _is_still(name: str) -> bool:
    """Say whether an epoch goes on; if so, something was chosen in it."""
    with epoch.lock:
        same = name == scopes.state.epoch
        _Chosen.anything |= same
        return same


def _turn() -> None:
    if _Chosen.anything:
        _Chosen.anything = False
        _set_everywhere(_epoch, scopes.state.epoch)


def _set_everywhere(context: Any, value: Any) -> None:
    """Set a context for all threads; JAX says how from 0.10.1 on."""
    own = context if hasattr(context, "set_global") else vars(context)["_obj"]
    own.set_global(value)


def spread_here() -> tuple[tuple[str, ...], str, tuple[str, ...]] | None:
    """Return how sequences are spread here: axes, balance, local backends; None: not at all."""
    return _spread.value  # type: ignore[no-any-return]


def within_spread(spread: tuple[tuple[str, ...], str, tuple[str, ...]] | None) -> Any:
    """Return the context manager within which sequences are spread so; part of JAX's key."""
    return _spread(spread)


def check() -> None:
    """Raise where JAX's key is not what is asked for here, so that a trace could be run elsewhere.

    Calls outside of traced code are kept by nobody.
    """
    key = _scope.value
    if key == _here() or not isinstance(jnp.zeros(()), jax.core.Tracer):
        return
    if key.startswith("\n\n") and not scopes.suspendable.get():
        _renew()
        return
    raise InvalidProblem(
        "got a call in traced code within a use_backend or record_selections that a coroutine or "
        "another thread has entered, expected one that a function of this thread did: JAX keeps "
        "what it traced for the thread, and other asyncio tasks run in it. Enter it in a function "
        "that is no coroutine (def step(): with use_backend(...): return f(x)), or pass backend= "
        "to the call."
    )


scopes.watchers.append(_follow)
epoch.listeners.append(_turn)
if _here() != _NOTHING:  # imported within a scope
    _follow(1, False)
