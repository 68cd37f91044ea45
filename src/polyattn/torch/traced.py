"""``attention`` inside ``torch.compile``: the choice is made while tracing, guarded, never stale.

What is read of the surroundings are attributes that the compiler guards (see
`polyattn.selection.scopes`). Admission and selection are one function of constants: a *model* of
the call (see `polyattn.torch.call_model`), in which lengths that the compiler keeps symbolic are
stood in for, and kernels take their sizes from the tensors.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch import is_autocast_enabled as _is_autocast_enabled

from polyattn.errors import InvalidProblem, PolyattnError
from polyattn.selection import Selection, scopes
from polyattn.selection.prepare import Plan, prepare
from polyattn.torch import jagged
from polyattn.torch.call_model import model_of
from polyattn.torch.dtensors import is_sharded
from polyattn.torch.internals import (
    are_higher,
    is_exported,
    mark_constant,
    order_effects,
    transforms,
)
from polyattn.torch.keys import switches
from polyattn.torch.kit.empty import answer_empty
from polyattn.torch.kit.masking import bind_mask
from polyattn.torch.open_lengths import Limits, limits_of, with_numbers
from polyattn.torch.plain_model import model_of_plain, plain_model_of
from polyattn.torch.refusals import through_compiler
from polyattn.torch.traced_problem import (
    IS_NUMPY,
    as_text,
    problem_of,
    wishes_of_traced,
    with_numbers_as_text,
)
from polyattn.torch.traced_sizes import any_empty, bounds_of
from polyattn.torch.untraced import untraced

__all__ = ["attention", "note", "noted", "trace_call"]


_plans: dict[int, Plan] = {}
_names: dict[Any, str] = {}
_limits: dict[Any, Limits] = {}
_state, _local = scopes.state, scopes.local


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    bias: Any,
    scale: Any,
    softcap: Any,
    sinks: Any,
    dropout_p: Any,
    layout: Any,
    return_lse: Any,
    deterministic: Any,
    backend: Any,
) -> Any:
    """Trace one call; the arguments are those of :func:`polyattn.torch.attention`."""
    given = {
        "mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks,
        "dropout_p": dropout_p, "layout": layout, "return_lse": return_lse,
        "deterministic": deterministic, "backend": backend,
    }  # fmt: skip
    if is_sharded(q, k, v):
        return _sharded(q, k, v, given)
    scale, softcap = as_text(scale), as_text(softcap)
    if scale == IS_NUMPY or softcap == IS_NUMPY:
        return untraced(q, k, v, given)
    if isinstance(dropout_p, Tensor) or dropout_p != 0.0:
        dropout_p = as_text(dropout_p)
    elif dropout_p is not False:
        dropout_p = 0.0  # whatever number a compiler keeps for it
    scope = _state.scope
    asked = (
        scale, softcap, dropout_p, layout, return_lse, deterministic, backend,
        None if scope is _state else scope, _local.traced, _local.module, _state.epoch,
    )  # fmt: skip
    if is_exported() and (written := _written(q, k, v, given, asked)) is not None:
        return written
    name, simple = "", None
    if mask is None and bias is None and sinks is None and _is_plain(q, k, v, layout):
        sizes, name = _prepared_plain(q, k, v, layout, asked)
    if name == "" and jagged.is_any_nested(q, k, v):
        return jagged.attention(trace_call, q, k, v, given)
    if name == "":
        q, k, v, sizes, simple, name = _prepared(q, k, v, mask, bias, sinks, layout, asked)
    if any_empty(sizes):
        return answer_empty(layout, return_lse, q, k, v, sinks, bias)
    if simple is not None:
        simple = bind_mask(simple, q.device)
    note(_number_of(name))
    if name.startswith("either"):  # by the number of keys, which is compared where it is known
        _, number, limit = name.split("_")
        name = f"operator_{number}" if k.shape[2] >= int(limit) else f"kernel_{number}"
    if name.startswith("operator"):
        return getattr(_state, name)(q, k, v)[0]
    return getattr(_state, name)(q, k, v, simple, bias, sinks)


def _sharded(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    from polyattn.torch import sharded  # loads what DTensors need

    return sharded.attention(trace_call, q, k, v, options)


def _written(q: Any, k: Any, v: Any, options: dict[str, Any], asked: Any) -> Any:
    """Write a call into the program that is exported; None where another backend is asked for."""
    from polyattn.torch import exported  # loads what compilers use

    return exported.attention(q, k, v, options, asked) if exported.is_portable(asked) else None


def trace_call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Trace a call with all options, in their order."""
    return attention(q, k, v, *options.values())


def _is_plain(q: Any, k: Any, v: Any, layout: Any) -> bool:
    """Whether these are ordinary tensors of four dimensions, in a layout of such."""
    return (
        (layout == "BTNH" or layout == "BNTH")
        and isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and not (q.is_nested or k.is_nested or v.is_nested)
        and f"{q.layout}{k.layout}{v.layout}" == "torch.stridedtorch.stridedtorch.strided"
        and q.dim() == 4
        and k.dim() == 4
        and v.dim() == 4
    )


def _prepared_plain(q: Any, k: Any, v: Any, layout: Any, asked: Any) -> tuple[Any, str]:
    sizes, found, bounds = plain_model_of(
        q, k, v, layout == "BNTH", asked, _limits_of_plain, bounds_of
    )
    return sizes, "" if found is None else _prepare_plain(found, bounds, asked)


def _prepared(
    q: Any, k: Any, v: Any, mask: Any, bias: Any, sinks: Any, layout: Any, asked: Any
) -> tuple[Any, Any, Any, Any, Any, str]:
    """Return q, k and v as autocast makes them, what may be empty, the mask, and the name."""
    cast = None
    if isinstance(q, Tensor) and q.element_size() != 8 and _is_autocast_enabled(q.device.type):
        cast = torch.get_autocast_dtype(q.device.type)
    asked = (*asked, cast)
    sizes, simple, model, bounds = model_of(q, k, v, mask, bias, sinks, layout, asked, _limits_of)
    name = "" if model is None else _prepare(model, bounds, asked, False)
    if name == "":  # wrong, or one whose symbolic sizes nothing can stand in for
        sizes, simple, model, _ = model_of(q, k, v, mask, bias, sinks, layout, asked, None)
        name = _prepare(model, None, asked, True)
    if cast is not None:
        q, k, v = q.to(cast), k.to(cast), v.to(cast)
    return q, k, v, sizes, simple, name


def _prepare(model: Any, bounds: Any, asked: Any, strict: bool) -> str:
    """Admit a call and select its backend; returns the name of what runs it among the kernels.

    `bounds`: see `polyattn.torch.traced_sizes`; None for a model of the very sizes.
    Not `strict`: "" for what is no call, since only such a model can say why.
    """
    _define_note()
    asked = with_numbers_as_text(asked)
    allowed, is_uncounted = (None, False) if bounds is None else bounds[4:]
    model = model if bounds is None else with_numbers(model, bounds[:4])
    if model is None:
        return ""
    key: Any = _key((model, allowed), asked)
    known = None if key is None else _names.get(key)
    if known is None:
        try:
            known = _kernel_named(model, asked, allowed)
        except InvalidProblem as error:
            if not strict:
                return ""
            raise through_compiler(error) from None
        except PolyattnError as error:
            raise through_compiler(error) from None
        if key is not None:
            _names[key] = known
    for_any = f"kernel_for_any_{_number_of(known)}"
    return for_any if is_uncounted and hasattr(_state, for_any) else known


mark_constant(_prepare)


def _key(model: Any, asked: Any) -> Any:
    """Return the key of what is decided, or None for an option without a hash."""
    key = (
        model, asked, switches(), torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(), are_higher(transforms()),
    )  # fmt: skip
    try:
        hash(key)
    except TypeError:  # for admission to say
        return None
    return key


def _prepare_plain(found: Any, bounds: Any, asked: Any) -> str:
    """Resolve a call of three tensors and nothing else, not strictly; "" under autocast."""
    if _is_autocast_enabled(found[2][0][1].type):
        return ""
    return _prepare(model_of_plain(found), bounds, (*asked, None), False)


mark_constant(_prepare_plain)


def _limits_of(model: Any, here: Any, is_open: Any, ends: Any, asked: Any) -> Limits:
    """Return for which sizes one choice serves; see `polyattn.torch.open_lengths`."""
    asked = with_numbers_as_text(asked)
    key = _key((model, here, is_open, ends), asked)
    known = None if key is None else _limits.get(key)
    if known is None:
        known = limits_of(
            model, here, is_open, ends,
            lambda model: (problem_of(model, asked), wishes_of_traced(asked)),
        )  # fmt: skip
        if key is not None:
            _limits[key] = known
    return known


mark_constant(_limits_of)


def _limits_of_plain(found: Any, here: Any, is_open: Any, ends: Any, asked: Any) -> Limits:
    return _limits_of(model_of_plain(found), here, is_open, ends, (*asked, None))


mark_constant(_limits_of_plain)


def _number_of(name: str) -> int:
    return int(name.split("_")[3 if name.startswith("kernel_for_any") else 1])


mark_constant(_number_of)


def _kernel_named(model: Any, asked: Any, allowed: tuple[str, ...] | None) -> str:
    wishes = wishes_of_traced(asked)
    if allowed is not None:
        wishes = replace(wishes, layer=frozenset(allowed))
    plan = prepare(problem_of(model, asked), wishes)
    with scopes.lock:
        number = next(_counter)
        _plans[number] = plan
        return _named(plan.kernel, number)


def _named(kernel: Any, number: int) -> str:
    """Put a kernel where compiled code finds it; what is nothing but an operator, as that."""
    operator = getattr(kernel, "operator", None)
    if operator is not None:
        setattr(_state, f"operator_{number}", operator)
        return f"operator_{number}"
    setattr(_state, f"kernel_{number}", kernel)
    if (for_any := getattr(kernel, "for_any", None)) is not None:
        setattr(_state, f"kernel_for_any_{number}", for_any)
    if (by_keys := getattr(kernel, "operator_from", None)) is None:
        return f"kernel_{number}"
    limit, operator = by_keys
    setattr(_state, f"operator_{number}", operator)
    return f"either_{number}_{limit}"


def noted(selection: Selection, kernel: Callable[..., Any]) -> int:
    """Return the number under which compiled code notes a selection that has no plan."""
    _define_note()
    with scopes.lock:
        number = next(_counter)
        _plans[number] = Plan(selection, kernel)
    return number


def note(number: int) -> None:
    """Trace the note of a call, where selections are recorded."""
    recorded = _state.recorded
    if recorded is not _state and recorded != "":
        torch.ops.polyattn.note(number)


_counter = itertools.count()


def _forget() -> None:
    """Drop the plans of the epoch before the last: code that was compiled then runs no more.

    Those of the last one stay, for code that passed its guards before the epoch ended.
    """
    _names.clear()
    _limits.clear()
    for number in _passing:
        _plans.pop(number, None)
        for name in (f"kernel_{number}", f"kernel_for_any_{number}", f"operator_{number}"):
            vars(_state).pop(name, None)
    _passing[:] = _plans


_passing: list[int] = []
scopes.listeners.append(_forget)


@functools.cache
def _define_note() -> None:
    """Define the operator that notes a call each time a compiled graph runs.

    It is an effect: compilers neither drop nor reorder it. Defined when something is first
    traced, since defining it imports much of the compiler.
    """

    @torch.library.custom_op("polyattn::note", mutates_args=())
    def note(number: int) -> None:
        for ran in scopes.recording.get(()):
            ran.append(_plans[number].selection)

    note.register_fake(lambda number: None)
    order_effects(torch.ops.polyattn.note.default)
