"""How a row of JAX's table is written: a short call with what is true of most of them left out."""

from __future__ import annotations

from typing import Any

from polyattn.flags import Knob

__all__ = ["config", "query", "variable"]


def config(name: str, type: Any, about: str, *, process: bool = False, **more: Any) -> Knob:
    """Return the row of an option of ``jax.config``.

    Most options have a value for the process and, in a context manager, another for a thread.
    Those that are read once, when a backend starts (`freezes`), and plain flags (`process`) do not.

    >>> config("jax_enable_x64", "bool", "64-bit types").scope
    'thread'
    """
    scope = "process" if process or more.get("freezes") else "thread"
    return Knob(
        name=name,
        kind="knob",
        type=type,
        about=about,
        where=f"jax.config.{name}",
        **({"scope": scope} | more),
    )


def variable(name: str, about: str, **more: Any) -> Knob:
    """Return the row of an environment variable that JAX, XLA or a library below them reads."""
    return Knob(
        name=f"env.{name}",
        kind="knob",
        type="str",
        about=about,
        freezes=True,
        where=f"the environment variable {name}",
        **({"allowed": "text, or None where it is not set"} | more),
    )


def query(name: str, type: Any, about: str, where: str, **more: Any) -> Knob:
    """Return the row of something that only the installation or the machine changes."""
    return Knob(name=name, kind="query", type=type, about=about, where=where, **more)
