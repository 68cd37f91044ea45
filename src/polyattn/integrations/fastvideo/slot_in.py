"""FastVideo's dense attention layers on polyattn's kernels: its selector answers with our class.

Replaced is one function, the one that FastVideo's ``get_attn_backend`` asks once requests, scopes
and its variable are read. See ``docs/fastvideo.md``.

Source: the order of precedence is that of ``fastvideo.attention.selector`` (Apache-2.0).
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from polyattn.errors import MissingDependency, Unsupported
from polyattn.forks import kept_free
from polyattn.integrations.on_import import OnImport

__all__ = ["DENSE", "HOME", "is_registered", "register", "unregister"]

HOME = "fastvideo.attention.selector"
"""The module that has the selector."""
DENSE = frozenset({"FLASH_ATTN", "TORCH_SDPA"})
"""Its kernels that are dense and exact: the layers that can use one can use any of ours."""

_RESOLVER = "_cached_get_attn_backend"
_PARAMETERS = (
    "head_size", "dtype", "supported_attention_backends", "default_backend", "requested",
    "env_backend", "component", "device_index",
)  # fmt: skip


class _Held:
    """What was replaced, and what it waits for."""

    def __init__(self) -> None:
        self.lock = kept_free(threading.RLock())
        self.theirs: Callable[..., Any] | None = None
        self.waiting: OnImport | None = None


_held = _Held()


def register() -> None:
    """Let polyattn choose and run FastVideo's dense layers that are built from now on.

    Twice is as once. FastVideo is not imported here: where it is not yet, this happens as soon as
    its selector is. Raises :class:`~polyattn.errors.MissingDependency` without FastVideo and
    :class:`~polyattn.errors.Unsupported` for a selector that is not the one this was written for
    (when that is imported); nothing is changed then.
    """
    if "fastvideo" not in sys.modules and importlib.util.find_spec("fastvideo") is None:
        raise MissingDependency(
            "got no package fastvideo, expected it in order to register with its selector: install "
            "https://github.com/hao-ai-lab/FastVideo as it says."
        )
    with _held.lock:
        if is_registered():
            return
        if HOME in sys.modules:
            _put_in_place()
        else:
            _held.waiting = OnImport(HOME, _put_in_place)


def _put_in_place() -> None:
    with _held.lock:
        _held.waiting = None
        home: Any = sys.modules[HOME]
        theirs = getattr(home, _RESOLVER, None)
        found = () if theirs is None else tuple(inspect.signature(theirs).parameters)
        if found != _PARAMETERS:
            raise Unsupported(
                f"got a {HOME} whose {_RESOLVER} takes ({', '.join(found)}), expected "
                f"({', '.join(_PARAMETERS)}), as FastVideo has it since August 2026; nothing was "
                "changed. Use another version of FastVideo, or no register()."
            )
        setattr(home, _RESOLVER, _in_place_of(theirs, home))
        _held.theirs = theirs


def unregister() -> None:
    """Leave FastVideo's selector as it was; without a :func:`register` nothing happens.

    Layers keep the class that they were built with.
    """
    with _held.lock:
        if _held.waiting is not None:
            _held.waiting.cancel()
            _held.waiting = None
        if _held.theirs is None:
            return
        setattr(sys.modules[HOME], _RESOLVER, _held.theirs)
        _held.theirs = None


def is_registered() -> bool:
    """Say whether :func:`register` is in force."""
    return _held.theirs is not None or _held.waiting is not None


def _in_place_of(theirs: Any, home: Any) -> Callable[..., Any]:
    """Return what is asked in the place of `theirs`, with its cache's own functions."""

    @functools.wraps(theirs)
    def resolve(
        head_size: int,
        dtype: Any,
        supported_attention_backends: Any = None,
        default_backend: Any = None,
        *,
        requested: Any = None,
        env_backend: str | None = None,
        component: str | None = None,
        device_index: int | None = None,
    ) -> Any:
        wished = _wished(
            home, supported_attention_backends or (), default_backend, requested, env_backend
        )
        if wished is None:
            return theirs(
                head_size, dtype, supported_attention_backends, default_backend,
                requested=requested, env_backend=env_backend, component=component,
                device_index=device_index,
            )  # fmt: skip
        # not cached: polyattn's own requests may be others at the next layer
        from polyattn.integrations.fastvideo.foreign_layer import for_foreign_layers
        from polyattn.integrations.fastvideo.selector import get_attn_backend

        found: Any = get_attn_backend(head_size, dtype, default_backend=wished or None)
        return for_foreign_layers(found)

    for name in ("cache_clear", "cache_info"):
        if hasattr(theirs, name):
            setattr(resolve, name, getattr(theirs, name))
    return resolve


@functools.cache
def _warn(home: Any, name: str, supported: tuple[str, ...]) -> None:
    """Say it as FastVideo does, once."""
    home.logger.warning(
        "Requested attention backend %s is not supported by this layer; supported backends are %s.",
        name,
        list(supported),
    )


def _wished(
    home: Any, supported: tuple[Any, ...], default: Any, requested: Any, env_backend: str | None
) -> str | None:
    """Return the dense kernel that FastVideo would be asked for, "" for any, None if not dense."""
    selected = requested
    if selected is None and env_backend is not None:
        selected = home.backend_name_to_enum(env_backend)
    if selected is None:
        selected = default
    if selected is not None and selected not in supported:
        _warn(home, selected.name, tuple(one.name for one in supported))
        selected = default if default in supported else None
    name = "" if selected is None else str(selected.name)
    dense = name in DENSE if name else any(one.name in DENSE for one in supported)
    # with this variable FastVideo's FLASH_ATTN is its quantised kernel
    quantised = name != "TORCH_SDPA" and (
        os.environ.get("FASTVIDEO_NVFP4_FA4") == "1"  # noqa: TID251 a variable of FastVideo's
    )
    return name if dense and not quantised else None
