"""The long way of a call, once for each class of calls, and what the short ways share.

A call is admitted (checked, made a Problem), a backend is chosen and its kernel prepared; the
result is remembered under the options of the call. Checkpointed regions and recorders are served
here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_deterministic_algorithms, is_grad_enabled

from polyattn import scopes, settings
from polyattn.decide import Wishes
from polyattn.errors import Unsupported
from polyattn.registry import registry
from polyattn.selection import Rejected
from polyattn.torch import recompute
from polyattn.torch.door import Call, admit, rebind
from polyattn.torch.empty import answer_empty
from polyattn.torch.fastpath import Entry, FastTable, tensor_check
from polyattn.torch.masking import is_static
from polyattn.torch.resolve import Plan, plan_for, prepared, wishes

__all__ = ["PLAIN", "around", "dispatch", "resolve", "runner", "table"]

PLAIN = (Tensor, torch.nn.Parameter)
"""The types of tensors that the fast tables hold; others take the long way each time."""

table = FastTable()
_state, _local = scopes.state, scopes.local


def around() -> Any:
    """Return what is in force around a call, as part of a key; None if nothing ever was."""
    if not _state.armed:
        return None
    return scopes.scope.get(None), _local.traced, _local.module


def dispatch(
    q: Any, k: Any, v: Any, *, backend: Any, layer: frozenset[str] | None = None, **options: Any
) -> Any:
    """Resolve what the fast table does not hold, replay checkpointed regions, record."""
    regions = recompute.regions() if _state.armed and recompute.is_possible() else None
    entry: Entry | None = None
    if regions is not None:
        place = (*_shape_key(q, k, v, options), layer)
        replayed, entry = regions.replay(place)
        if replayed and entry is None:  # the forward pass was under no request
            entry = _entry(q, k, v, backend, layer, options, asked=False)
        elif entry is not None and not entry[0](q, k, v):
            entry = _again(entry, q, k, v, backend, layer, options)
    if entry is None:
        entry = _entry(q, k, v, backend, layer, options)
    if regions is not None:
        regions.note(place, entry)
    for ran in scopes.recording.get(()):
        ran.append(entry[2].selection)
    return entry[1](q, k, v, options["mask"], options["bias"], options["sinks"])


def resolve(
    q: Any, k: Any, v: Any, backend: Any, layer: frozenset[str] | None, options: Any
) -> tuple[Plan, Call]:
    """Admit a call and plan it under the wishes in force here."""
    call = admit(q, k, v, **options)
    return plan_for(
        call.problem, wishes(backend, layer, scopes.current_scope(), _local.module)
    ), call


def _entry(
    q: Any, k: Any, v: Any, backend: Any, layer: frozenset[str] | None, options: Any,
    asked: bool = True,
) -> Entry:  # fmt: skip
    """Return the cached entry of a call, or make one; not `asked`: as if under no request."""
    key = _key(q, options, backend, layer) if asked else None
    found = table.find(key, q, k, v) if key is not None else None
    if found is not None:
        return found
    epoch = _state.epoch
    call = admit(q, k, v, **options)
    wanted = wishes(backend, layer, scopes.current_scope(), _local.module)
    if not asked:
        wanted = Wishes(
            call=wanted.call, env=wanted.env, layer=layer, on_unsupported=wanted.on_unsupported
        )
    plan = plan_for(call.problem, wanted)
    entry = (tensor_check(q, k, v), runner(plan, call), plan)
    if key is not None and type(q) in PLAIN:
        table.add(key, entry, epoch)
    return entry


def _again(entry: Entry, q: Any, k: Any, v: Any, backend: Any, layer: Any, options: Any) -> Entry:
    """Prepare the noted choice for a recomputation that differs from the forward pass.

    Reentrant checkpointing runs the forward pass without gradients and computes again with them,
    which another kernel of the same backend may be for.
    """
    noted = entry[2].selection
    key = _key(q, options, backend, layer)
    key = None if key is None else (*key, "again", noted.backend, noted.source, str(noted.config))
    found = table.find(key, q, k, v) if key is not None else None
    if found is not None:
        return found
    epoch = _state.epoch
    call = admit(q, k, v, **options)
    if reasons := registry[noted.backend].check(call.problem):
        if not noted.source.is_request:
            return _entry(q, k, v, backend, layer, options, asked=False)
        decisions = {**noted.decisions, noted.backend: Rejected(reasons)}
        raise Unsupported(
            f"got a recomputation of a forward pass that ran on {noted.backend} ({noted.source}), "
            f"which cannot run it with gradients: {decisions[noted.backend]}. Expected a backend "
            f"that trains; ask for another one.\n  {call.problem}",
            decisions,
        )
    selection = replace(noted, problem=call.problem)
    plan = Plan(selection, prepared(selection, call.problem))
    again = (tensor_check(q, k, v), runner(plan, call), plan)
    if key is not None and type(q) in PLAIN:
        table.add(key, again, epoch)
    return again


def _key(q: Any, options: Any, backend: Any, layer: Any) -> Any:
    """Return the key of the fast table, or None for calls that it cannot hold."""
    mask, bias, sinks = options["mask"], options["bias"], options["sinks"]
    try:
        key: tuple[Any, ...] = (
            options["layout"], None if mask is None else mask.signature, options["scale"],
            backend, around(), _get_deterministic_algorithms(), settings.raw(settings.BACKEND),
        )  # fmt: skip
        rare = tuple(options[n] for n in ("softcap", "dropout_p", "return_lse", "deterministic"))
        if rare[0] is not None or rare[1] != 0.0 or rare[2] or rare[3] is not None:
            key += rare
        if bias is not None or sinks is not None or layer is not None:
            arrays = [getattr(bias, "payload", bias), sinks]
            key += (getattr(bias, "signature", None), *map(_array_key, arrays), layer)
        if torch.is_autocast_enabled(q.device.type):
            # the compiled check sees that autocast is on, not to which dtype it casts: such
            # entries lie where only this way finds them
            key += (torch.get_autocast_dtype(q.device.type),)
        hash(key)
    except (TypeError, AttributeError, RuntimeError):
        return None
    return key


def _array_key(x: Any) -> Any:
    return x if x is None else (x.shape, x.dtype, x.device, x.requires_grad and is_grad_enabled())


def _shape_key(q: Any, k: Any, v: Any, options: Any) -> Any:
    mask = options["mask"]
    signature = None if mask is None else mask.signature
    return q.shape, k.shape, v.shape, q.dtype, signature, options["return_lse"]


def runner(plan: Plan, call: Call) -> Callable[..., Any]:
    """Return ``run(q, k, v, mask, bias, sinks)`` around the kernel, as thin as the call allows."""
    kernel, problem, bound = plan.kernel, call.problem, call.mask
    if call.cast is not None:
        return _cast_runner(plan, call)
    if problem.empty:
        return lambda q, k, v, mask=None, bias=None, sinks=None: answer_empty(
            problem.layout, problem.lse, q, k, v, sinks, bias
        )
    if bound is None:
        if not call.masked and _takes_three(kernel):
            return kernel  # no frame between the call and the kernel
        return lambda q, k, v, mask=None, bias=None, sinks=None: kernel(q, k, v, None, bias, sinks)
    if is_static(bound):
        return lambda q, k, v, mask=None, bias=None, sinks=None: kernel(q, k, v, bound, bias, sinks)
    return lambda q, k, v, mask=None, bias=None, sinks=None: kernel(
        q, k, v, rebind(mask, problem, q.device), bias, sinks
    )


def _takes_three(kernel: Any) -> bool:
    return isinstance(kernel, FunctionType) and len(kernel.__defaults__ or ()) >= 3


def _cast_runner(plan: Plan, call: Call) -> Callable[..., Any]:
    run, dtype = runner(plan, replace(call, cast=None)), call.cast

    def cast(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        with torch.autocast(q.device.type, enabled=False):
            return run(q, k, v, mask, bias, sinks)

    return cast
