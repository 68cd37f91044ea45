"""What is asked for around a call, as a part of the key of JAX's caches.

``jax.jit`` keeps what it traced. A scope, a forced backend, a newly registered one or a measured
time may all change what a call runs on, so each is part of the key: code that was traced under
another is traced again, never run. ``jax.make_user_context`` is JAX's means for that.

A scope lives in a ``ContextVar``, JAX's key in the thread. They differ where asyncio changes tasks
within a scope: calls that are traced then are refused (:func:`check`).
"""

from __future__ import annotations

from typing import Any

import jax

from polyattn import epoch
from polyattn.errors import InvalidProblem
from polyattn.selection import scopes

__all__ = ["check", "follow", "spread_here", "within_spread"]

_scope = jax.make_user_context("\n0")
_epoch = jax.make_user_context("")
_spread = jax.make_user_context(None)


def _here() -> str:
    """Return what is asked for here, and who records it: each recorder sees code traced anew."""
    return f"{scopes.current_scope() or ''}\n{scopes.recorder.get()}"


def follow() -> None:
    """Make JAX's key of this thread what is asked for here."""
    _scope(_here()).__enter__()


def _turn() -> None:
    _epoch.set_global(scopes.state.epoch)


def spread_here() -> tuple[tuple[str, ...], str, tuple[str, ...]] | None:
    """Return how sequences are spread here: axes, balance, local backends; None: not at all."""
    return _spread.value  # type: ignore[no-any-return]


def within_spread(spread: tuple[tuple[str, ...], str, tuple[str, ...]] | None) -> Any:
    """Return the context manager within which sequences are spread so; part of JAX's key."""
    return _spread(spread)


def check() -> None:
    """Raise where a call is traced in another asyncio task than its scope was entered in."""
    if _scope.value != _here():
        raise InvalidProblem(
            "got a call within use_backend or record_selections while another asyncio task's is "
            "in force in this thread, expected one at a time: JAX keeps what it traced for the "
            "thread. Enter it around code that does not await, or pass backend= to the call."
        )


scopes.watchers.append(follow)
epoch.listeners.append(_turn)
follow()
_turn()
