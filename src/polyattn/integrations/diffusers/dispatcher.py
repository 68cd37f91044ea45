"""Registering with diffusers' dispatcher, and leaving it as it was."""

from __future__ import annotations

import sys
import threading
from typing import Any

from polyattn.forks import kept_free
from polyattn.integrations.diffusers.enum_member import add_member, remove_member
from polyattn.integrations.diffusers.library import HOME, NAME, library, require
from polyattn.integrations.on_import import OnImport

__all__ = ["is_registered", "register", "unregister"]


class _Anything(set[str]):
    """The names that a backend takes, of one that takes them all: the dispatcher drops no other."""

    def __contains__(self, name: object) -> bool:
        return True


class _Held:
    """Whether it is registered, and what it waits for."""

    def __init__(self) -> None:
        self.lock = kept_free(threading.RLock())
        self.member: Any = None
        self.waiting: OnImport | None = None


_held = _Held()


def register(untested: bool = False) -> None:
    """Make "polyattn" one of diffusers' attention backends; twice is as once.

    diffusers is not imported here: where it is not yet, this happens as soon as it is.
    `untested`: with a version of diffusers that is newer than those this was tested with, too.

    Raises :class:`~polyattn.errors.MissingDependency` without diffusers or torch, and
    :class:`~polyattn.errors.Unsupported` for a version outside the tested range. Nothing is changed
    then.

    >>> register()
    >>> from diffusers.models.attention_dispatch import AttentionBackendName
    >>> AttentionBackendName("polyattn").value
    'polyattn'
    >>> unregister()
    """
    require(untested)
    with _held.lock:
        if is_registered():
            return
        if HOME in sys.modules:
            _put_in_place()
        else:
            _held.waiting = OnImport(HOME, _put_in_place)


def _put_in_place() -> None:
    from polyattn.integrations.diffusers.dispatched import polyattn_attention

    with _held.lock:
        _held.waiting = None
        found = library()
        member = add_member(found.names, NAME.upper(), NAME)
        found.registry.register(member, supports_context_parallel=True)(polyattn_attention)
        taken = vars(found.registry)["_supported_arg_names"]
        taken[member] = _Anything(taken[member])
        _held.member = member


def unregister() -> None:
    """Leave diffusers as it was before :func:`register`; without one nothing happens.

    Where "polyattn" is the active backend, "native" becomes it. Models that are set to it raise
    when they are called next.
    """
    with _held.lock:
        if _held.waiting is not None:
            _held.waiting.cancel()
            _held.waiting = None
        if _held.member is None:
            return
        member, _held.member = _held.member, None
        found = library()
        tables = vars(found.registry)
        if tables["_active_backend"] == member:
            found.registry.set_active_backend(found.names("native"))
        for table in ("_backends", "_constraints", "_supported_arg_names"):
            tables[table].pop(member, None)
        tables["_supports_context_parallel"].discard(member.value)
        remove_member(found.names, member)


def is_registered() -> bool:
    """Say whether :func:`register` is in force."""
    return _held.member is not None or _held.waiting is not None
