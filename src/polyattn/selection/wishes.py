"""Wishes: everything that is asked for at one call, by whoever may ask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polyattn import settings
from polyattn.selection import Source, scopes
from polyattn.selection.registry import registry
from polyattn.selection.requests import Request

__all__ = ["Wishes", "current_wishes", "wishes_of"]

_NOTHING = Request()


@dataclass(frozen=True)
class Wishes:
    """Everything that is asked for at one call.

    `left`: the kernels that the framework's own switches leave to an automatic choice; None: all.
    `exporting`: the call is written into a program that others run, without polyattn.
    """

    forced: Request = field(default_factory=Request)
    call: Request = field(default_factory=Request)
    scope: Request = field(default_factory=Request)
    module: Request = field(default_factory=Request)
    env: Request = field(default_factory=Request)
    layer: frozenset[str] | None = None
    left: frozenset[str] | None = None
    on_unsupported: str = "error"
    exporting: bool = False

    def ordered(self) -> tuple[tuple[Source, Request], ...]:
        """Return the requests that name a backend, strongest first."""
        every = (
            (Source.FORCED, self.forced), (Source.CALL, self.call), (Source.SCOPE, self.scope),
            (Source.MODULE, self.module), (Source.ENV, self.env),
        )  # fmt: skip
        return tuple((source, request) for source, request in every if request.names)


def wishes_of(
    backend: Any = None,
    layer: frozenset[str] | None = None,
    scope: str | None = None,
    module: str | None = None,
    left: frozenset[str] | None = None,
) -> Wishes:
    """Gather everything that is asked for; unknown names raise UnknownBackend.

    `backend`: as given to the call. `layer`: what the layer supports. `scope`, `module`: what is in
    force around the call, encoded, as a compiler's guards hold them. `left`: as in :class:`Wishes`.
    """
    forced = scopes.state.forced
    env = settings.current().backend
    policy = (module or "").partition("\n")[0]
    return Wishes(
        forced=Request(registry.expand(forced, asked_by="force")) if forced else _NOTHING,
        call=_NOTHING if backend is None else Request.make(_names(backend)),
        scope=Request.decode(scope) if scope else _NOTHING,
        module=_NOTHING if policy in ("", "-") else Request.decode(policy),
        env=Request(registry.expand(env, asked_by="POLYATTN_BACKEND")) if env else _NOTHING,
        layer=layer,
        left=left,
        on_unsupported=settings.current().on_unsupported,
    )


def current_wishes(
    backend: Any = None, layer: frozenset[str] | None = None, left: frozenset[str] | None = None
) -> Wishes:
    """Gather everything that is asked for here: at the call, by its layer, and all around it.

    >>> from polyattn import use_backend
    >>> with use_backend("flex"):
    ...     [(str(source), request.names) for source, request in current_wishes().ordered()]
    [('SCOPE', ('flex',))]
    """
    return wishes_of(backend, layer, scopes.current_scope(), scopes.local.module, left)


def _names(backend: Any) -> tuple[Any, ...]:
    return tuple(backend) if isinstance(backend, (list, tuple)) else (backend,)
