"""What is left to torch's own functions: noted by recorders, or forbidden by a request."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polyattn.errors import Unsupported
from polyattn.selection import Selection, Source, scopes
from polyattn.selection.registry import registry
from polyattn.selection.wishes import wishes_of
from polyattn.torch import traced
from polyattn.torch.internals import mark_constant, torch_sdpa
from polyattn.torch.refusals import through_compiler

__all__ = ["hand_to_torch", "leave_traced", "noted_for_torch", "traced_scope"]

SDPA = "scaled_dot_product_attention"
_state = scopes.state


def hand_to_torch(reason: str, function: str = SDPA) -> None:
    """Note that torch's own function runs a call, or raise Unsupported if a request forbids."""
    selection = _selection(reason, scopes.current_scope(), scopes.local.module, function)
    for ran in scopes.recording.get(()):
        ran.append(selection)


def _selection(
    reason: str, scope: str | None, module: str | None, function: str = SDPA
) -> Selection:
    """Return the selection of torch's own function; raise Unsupported if a request forbids it."""
    fallback = _refused(reason, scope, module, function)
    return Selection(
        "torch", Source.HEURISTIC, reason=reason, version=torch.__version__, fallback=fallback
    )


def _refused(reason: str, scope: str | None, module: str | None, function: str) -> str | None:
    """Return which request gives way to torch's own function, if one does; raise if it may not."""
    wanted = wishes_of(None, None, scope, module)
    asked = [(str(source), f"asks for {_listed(r.names)}") for source, r in wanted.ordered()]
    barred = [name for name in wanted.scope.never if name in registry.groups()["torch_sdpa"]]
    if barred:
        asked.append(("SCOPE", f"forbids {_listed(barred)}"))
    if not asked:
        return None
    source, wish = asked[0]
    request = wanted.ordered()[0][1] if wanted.ordered() else wanted.scope
    policy = request.on_unsupported or wanted.scope.on_unsupported or wanted.on_unsupported
    if policy == "fallback" and not barred:
        return f"{source} {wish}, but polyattn does not model {reason}"
    allow = "" if barred else 'allow torch to step in with on_unsupported="fallback", '
    raise Unsupported(
        f"got a call that polyattn does not model ({reason}) and would leave to torch's own "
        f"{function}, expected one for a backend of polyattn, since {source} "
        f"{wish}. Lift the request around this call, {allow}or pass what polyattn models."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


# --- the same while a compiler traces ---


def traced_scope() -> str | None:
    """Return the request of the innermost scope around code that is traced."""
    scope = _state.scope
    return scopes.local.traced or (None if scope is _state else scope)


def leave_traced(reason: str, function: str) -> None:
    """Trace the note that torch runs a call, or raise Unsupported if a request forbids it."""
    traced.note(_noted(reason, traced_scope(), scopes.local.module, function, _state.epoch))


def _noted(reason: str, scope: str | None, module: str | None, function: str, epoch: str) -> int:
    return noted_for_torch(reason, scope, module, function)


mark_constant(_noted)


def noted_for_torch(
    reason: str, scope: str | None, module: str | None, function: str = SDPA
) -> int:
    """Return the number under which compiled code notes that torch runs a call."""
    registry.discover()  # which ends the epoch, and with it what was noted
    try:
        return traced.noted(_selection(reason, scope, module, function), torch_sdpa)
    except Unsupported as error:
        raise through_compiler(error) from None
