"""The long way of a call, once for each class of calls, and what the short ways share.

A call is admitted (checked, made a Problem), a backend is chosen and its kernel prepared; the
result is remembered under the key of the call. Checkpointed regions and recorders are served
here, too. Each way in is a :class:`Way` in front of this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor

from polyattn.errors import Unsupported
from polyattn.masks import Dense
from polyattn.problem import Problem
from polyattn.selection import Rejected, scopes
from polyattn.selection.prepare import Plan, kernel_of, prepare
from polyattn.selection.registry import registry
from polyattn.selection.wishes import Wishes, current_wishes
from polyattn.torch import checkpoints
from polyattn.torch.admission import Call, admit
from polyattn.torch.cache import Entry, Wide, resized, table
from polyattn.torch.keys import Key, switches
from polyattn.torch.kit.empty import answer_empty
from polyattn.torch.repeated_masks import rebinder
from polyattn.torch.size_classes import size_class, span_of
from polyattn.torch.tensor_checks import tensor_check

__all__ = [
    "AttentionWay",
    "Way",
    "dispatch",
    "prepare_call",
    "runner",
    "switched_on",
    "wishes_here",
]

_state = scopes.state


class Way(Protocol):
    """One way in: how its calls are admitted, and what runs them."""

    @property
    def mask(self) -> Any:
        """The mask that calls are admitted with."""

    def admit(self, q: Any, k: Any, v: Any) -> Call:
        """Check the call."""

    def runner(self, plan: Plan, call: Call) -> Callable[..., Any]:
        """Return ``run(q, k, v, *arguments)`` around the plan's kernel."""


@dataclass(frozen=True)
class AttentionWay:
    """Calls of ``attention``: `options` are its own."""

    options: dict[str, Any]

    @property
    def mask(self) -> Any:
        return self.options["mask"]

    def admit(self, q: Any, k: Any, v: Any) -> Call:
        return admit(q, k, v, **self.options)

    def runner(self, plan: Plan, call: Call) -> Callable[..., Any]:
        kernel, given = plan.kernel, self.mask
        plain = call.cast is None and not call.problem.empty and type(given) is Dense
        if plain and isinstance(call.mask, Dense) and call.mask.mask is given.mask:
            # of such arrays the key says shape, dtype and device: there is nothing to bind or check
            return lambda q, k, v, mask=None, bias=None, sinks=None: kernel(
                q, k, v, mask, bias, sinks
            )
        return runner(plan, call)


def dispatch(
    way: Way, key: Key | None, q: Any, k: Any, v: Any, arguments: tuple[Any, ...], backend: Any
) -> Any:
    """Prepare what the table does not hold, replay checkpointed regions, record, run.

    `arguments`: what the way's runner takes beside q, k and v. Without a `key` nothing is
    remembered.
    """
    key = _with_cast(key, q)
    regions = checkpoints.regions() if _state.armed and checkpoints.is_possible() else None
    entry: Entry | Wide | None = None
    if regions is not None:
        place = (q.shape, k.shape, v.shape, q.dtype, *_kind(key))
        replayed, entry = regions.replay(place)
        if replayed and entry is None:  # the forward pass was under no request
            entry = _entry(way, None, q, k, v, backend, asked=False)
        elif entry is not None and not entry.check(q, k, v):
            entry = _again(entry, way, key, q, k, v, backend)
    if entry is None:
        entry = _entry(way, key, q, k, v, backend)
    if regions is not None:
        regions.note(place, entry)
    for ran in scopes.recording.get(()):
        chosen = entry.plan.selection
        ran.append(resized(chosen, q, k, *arguments[:2]) if isinstance(entry, Wide) else chosen)
    return entry.run(q, k, v, *arguments)


def _with_cast(key: Key | None, q: Any) -> Key | None:
    """Add what autocast casts to, which the check of tensors does not see; only this way does."""
    kind = q.device.type if isinstance(q, Tensor) else ""
    if key is None or kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return key
    return key._replace(cast=torch.get_autocast_dtype(kind))


def _kind(key: Key | None) -> tuple[Any, ...]:
    return () if key is None else (key.mask, key.return_lse, key.door)


def prepare_call(way: Way, q: Any, k: Any, v: Any, backend: Any) -> tuple[Plan, Call]:
    """Admit a call and prepare its kernel under the wishes in force here."""
    call = way.admit(q, k, v)
    return prepare(call.problem, wishes_here(backend)), call


def wishes_here(backend: Any = None, layer: frozenset[str] | None = None) -> Wishes:
    """Gather what is asked for here, and what torch's own switches leave to choose from."""
    return current_wishes(backend, layer, switched_on())


def switched_on() -> frozenset[str] | None:
    """Return the kernels that torch's own switches leave, or None when all are on."""
    found = switches()
    names = "sdpa_flash", "sdpa_efficient", "sdpa_math", "sdpa_cudnn"
    return None if found is None else frozenset(n for n, on in zip(names, found, strict=True) if on)


def _entry(
    way: Way, key: Key | None, q: Any, k: Any, v: Any, backend: Any, asked: bool = True
) -> Entry | Wide:
    """Return the remembered entry of a call, or make one; not `asked`: as if under no request."""
    found = table.find(key, q, k, v)
    if found is not None:
        return found
    epoch = _state.epoch
    call = way.admit(q, k, v)
    wanted = wishes_here(backend)
    if not asked:
        wanted = Wishes(
            call=wanted.call, env=wanted.env, left=wanted.left, on_unsupported=wanted.on_unsupported
        )
    plan = prepare(call.problem, wanted)
    return _remember(way, plan, call, key, q, k, v, epoch, _is_of_class(plan, wanted))


def _remember(
    way: Way,
    plan: Plan,
    call: Call,
    key: Key | None,
    q: Any,
    k: Any,
    v: Any,
    epoch: str,
    of_class: bool = False,
) -> Entry:
    run = way.runner(plan, call)
    entry = Entry(tensor_check(q, k, v), run, plan, getattr(run, "operator", None))
    if plan.is_final:
        wide = _wide(way.mask, entry, call.problem, q, k, v) if of_class else None
        table.add(key, entry, q, k, v, epoch, wide)
    return entry


def _is_of_class(plan: Plan, wanted: Wishes) -> bool:
    """Say whether a choice is that of all sizes of its class (see `polyattn.torch.size_classes`).

    What was asked for first may refuse some of them: then the next one is right for these alone.
    """
    chosen = plan.selection
    if not registry["torch", chosen.backend].any_lengths:
        return False
    asked = wanted.ordered()
    return not asked or (chosen.source.is_request and asked[0][1].names[0] == chosen.backend)


def _wide(
    mask: Any, entry: Entry, problem: Problem, q: Tensor, k: Tensor, v: Tensor
) -> Wide | None:
    """Return what serves the other sizes of the call's class, if there is a class."""
    if problem.paged is not None or size_class(problem.layout, q.shape, k.shape, v.shape) is None:
        return None
    span = span_of(mask, problem.q_len, problem.kv_len)
    if span is None:
        return None
    row = 1 if problem.layout == "BTNH" else 2
    return Wide(tensor_check(q, k, v, (0, row)), entry.run, entry.plan, *span)


def _again(
    entry: Entry | Wide, way: Way, key: Key | None, q: Any, k: Any, v: Any, backend: Any
) -> Entry | Wide:
    """Prepare the noted choice for a recomputation that differs from the forward pass.

    Reentrant checkpointing runs the forward pass without gradients and computes again with them,
    which another kernel of the same backend may be for.
    """
    noted = entry.plan.selection
    if key is not None:
        key = key._replace(noted=(noted.backend, noted.source, str(noted.config)))
    found = table.find(key, q, k, v)
    if found is not None:
        return found
    epoch = _state.epoch
    call = way.admit(q, k, v)
    if reasons := registry["torch", noted.backend].check(call.problem):
        if not noted.source.is_request:
            return _entry(way, None, q, k, v, backend, asked=False)
        decisions = {**noted.decisions, noted.backend: Rejected(reasons)}
        raise Unsupported(
            f"got a recomputation of a forward pass that ran on {noted.backend} ({noted.source}), "
            f"which cannot run it with gradients: {decisions[noted.backend]}. Expected a backend "
            f"that trains; ask for another one.\n  {call.problem}",
            decisions,
        )
    selection = replace(noted, problem=call.problem)
    plan = Plan(selection, kernel_of(selection, call.problem))
    return _remember(way, plan, call, key, q, k, v, epoch)


def runner(plan: Plan, call: Call) -> Callable[..., Any]:
    """Return ``run(q, k, v, mask, bias, sinks)`` around the kernel, as thin as the call allows."""
    kernel, problem, bound = plan.kernel, call.problem, call.mask
    if call.cast is not None:
        return _cast_runner(plan, call)
    if problem.empty:
        return lambda q, k, v, mask=None, bias=None, sinks=None: answer_empty(
            problem.layout, problem.lse, q, k, v, sinks, bias
        )
    binds = getattr(kernel, "bound_to", None)  # a kernel of the extension
    if bound is None:
        if not call.masked and (binds is not None or _takes_three(kernel)):
            return kernel  # type: ignore[no-any-return]  # no frame between the call and the kernel
        return lambda q, k, v, mask=None, bias=None, sinks=None: kernel(q, k, v, None, bias, sinks)
    if bound.is_static and binds is not None:
        return binds(bound)  # type: ignore[no-any-return]
    if bound.is_static:
        return lambda q, k, v, mask=None, bias=None, sinks=None: kernel(q, k, v, bound, bias, sinks)
    bind = rebinder(problem)
    return lambda q, k, v, mask=None, bias=None, sinks=None: kernel(
        q, k, v, bind(mask, q, k), bias, sinks
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
