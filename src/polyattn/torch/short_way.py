"""The short way of a call: from its arguments to the kernel that an earlier one has prepared.

One small key of options and a compiled check of the three tensors (their types, dtypes, devices,
shapes, strides, gradients, dispatch state), then the kernel. Each function runs its call, or gives
:data:`MISSED` without having called a kernel: then the call is of a new class, or a wrong one, or
somebody watches it, all of which `polyattn.torch.long_way` is for.

The functions here say what that is. Where the native extension is built, its class ``Door``
(native/src/door.cpp) does the same, in a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from polyattn import settings
from polyattn.errors import MissingDependency
from polyattn.masks import LEAVES, OPERATORS, Dense
from polyattn.native.module import load
from polyattn.selection import scopes
from polyattn.torch import checkpoints
from polyattn.torch.cache import PLAIN, resized, table, wide_of
from polyattn.torch.internals import function_modes, is_grad_enabled
from polyattn.torch.keys import (
    STRANGE,
    SWITCHES,
    Key,
    around,
    array_key,
    bias_key,
    determined,
    mask_key,
    switches,
)

__all__ = [
    "MISSED", "attention", "drop_in", "heard", "in_python", "native", "paged", "quantized", "sdpa",
]  # fmt: skip

MISSED: Any = type("Missed", (), {"__repr__": lambda self: "MISSED"})()
"""What is given where the call has to go the long way."""

_rows, _plain = table.rows, table.plain
_state, _local = scopes.state, scopes.local
_scope, _recorders = scopes.scope.get, scopes.recording.get
_environ, _BACKEND = settings.raw, settings.BACKEND


def _attention(
    q: Any,
    k: Any,
    v: Any,
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
    operator = run = None
    recorders = _recorders(()) if _state.armed else ()
    options = (
        mask, bias, scale, softcap, sinks, dropout_p, layout, return_lse, deterministic, backend,
    )  # fmt: skip
    try:
        if not _is_taken(q, k, v):
            return MISSED
        if (
            mask is None
            and bias is None
            and scale is None
            and softcap is None
            and sinks is None
            and deterministic is None
            and backend is None
            and return_lse is False
            and type(dropout_p) is float
            and dropout_p == 0.0
            and around() is None
            and not recorders
        ):
            run, operator = _plainest(q, k, v, layout)
        if run is None:
            run = _found(Key.of(q, k, *options), q, k, v, recorders, mask, bias)
    except STRANGE:
        return MISSED
    if operator is not None:
        return operator(q, k, v)[0]
    return MISSED if run is None else run(q, k, v, mask, bias, sinks)


def _sdpa(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any
) -> Any:
    try:
        if not _is_taken(q, k, v):
            return MISSED
        key = Key.of_sdpa(q, k, attn_mask, dropout_p, is_causal, scale, gqa)
        run = _found(key, q, k, v, _recorders(()) if _state.armed else (), attn_mask)
    except STRANGE:
        return MISSED
    return MISSED if run is None else run(q, k, v, attn_mask)


def _drop_in(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any
) -> Any:
    """Go the way of :func:`_sdpa`, unless a function mode may want to see the call."""
    if function_modes():
        return MISSED
    return _sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale, gqa)


def _heard(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any,
    deaf: type,
) -> Any:  # fmt: skip
    """Go the way of :func:`_drop_in`; return (selection, output), of a class that of the class.

    For whoever listens. Missed too where somebody records the call; recorders of the type `deaf`
    hear of compiled code alone, and are not told.
    """
    if function_modes():
        return MISSED
    recorders = _recorders(()) if _state.armed else ()
    if any(type(one) is not deaf for one in recorders):
        return MISSED
    selections: list[Any] = []
    try:
        if not _is_taken(q, k, v):
            return MISSED
        key = Key.of_sdpa(q, k, attn_mask, dropout_p, is_causal, scale, gqa)
        run = _found(key, q, k, v, (selections,), attn_mask)
    except STRANGE:
        return MISSED
    if run is None:
        return MISSED
    (selection,) = selections
    return selection.of_class or selection, run(q, k, v, attn_mask)


def _paged(
    q: Any,
    k: Any,
    v: Any,
    block_table: Any,
    lengths: Any,
    mask: Any,
    scale: Any,
    softcap: Any,
    sinks: Any,
    layout: Any,
    return_lse: Any,
    backend: Any,
) -> Any:
    options = mask, scale, softcap, sinks, layout, return_lse, backend
    try:
        if not _is_taken(q, k, v):
            return MISSED
        key = Key.of_paged(q, k, block_table, lengths, *options)
        run = _found(key, q, k, v, _recorders(()) if _state.armed else ())
    except STRANGE:
        return MISSED
    return MISSED if run is None else run(q, k, v, mask, None, sinks, block_table, lengths)


def _quantized(
    q: Any,
    k: Any,
    v: Any,
    key_scales: Any,
    value_scales: Any,
    block_size: Any,
    mask: Any,
    bias: Any,
    scale: Any,
    softcap: Any,
    sinks: Any,
    layout: Any,
    return_lse: Any,
    backend: Any,
) -> Any:
    quantised = key_scales, value_scales, block_size
    options = mask, bias, scale, softcap, sinks, layout, return_lse, backend
    try:
        if not _is_taken(q, k, v):
            return MISSED
        key = Key.of_quantized(q, k, *quantised, *options)
        run = _found(key, q, k, v, _recorders(()) if _state.armed else (), mask, bias)
    except STRANGE:
        return MISSED
    return MISSED if run is None else run(q, k, v, mask, bias, sinks, *quantised)


def _is_taken(q: Any, k: Any, v: Any) -> bool:
    """Say whether the table may hold a call of these, and no checkpointed region wants it."""
    if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
        return False
    if q.is_nested or k.is_nested or v.is_nested:  # with which no check can be asked
        return False
    return not (_state.armed and checkpoints.is_possible())


def _plainest(q: Any, k: Any, v: Any, layout: Any) -> tuple[Any, Any]:
    """Return what runs a call of which nothing is asked, and the operator that this is."""
    known = _plain.get(layout)
    if known is None or known[3] is not determined() or known[4] is not _environ(_BACKEND):
        return None, None
    if switches() is not None:
        return None, None
    for check, run, operator in (known[:3], *known[5]):
        if check(q, k, v):
            return run, operator
    return None, None


def _found(key: Key, q: Any, k: Any, v: Any, recorders: Any, *added: Any) -> Any:
    """Return what runs a call of this key, or None; what is found is noted by the recorders."""
    row = _rows.get(key)
    if row is None:
        return None
    run, plan, wide = row.run, row.plan, None
    if not row.check(q, k, v):
        alike = row.by_shapes.get((q.shape, k.shape, v.shape), ())
        entry: Any = next((entry for entry in alike if entry.check(q, k, v)), None)
        if entry is None:
            entry = wide = wide_of(row, key.layout, q, k, v)
        if entry is None:
            return None
        run, plan = entry.run, entry.plan
    for ran in recorders:
        ran.append(resized(plan.selection, q, k, *added) if wide else plan.selection)
    return run


in_python = SimpleNamespace(
    attention=_attention, sdpa=_sdpa, drop_in=_drop_in, heard=_heard, paged=_paged,
    quantized=_quantized,
)  # fmt: skip
"""The functions as they are written here."""


def _in_native() -> Any:
    """Return the functions of the extension, or None where it is not built."""
    environ = getattr(_environ, "__self__", None)
    try:
        door = load().Door
    except (MissingDependency, AttributeError):  # none, or one of older sources
        return None
    static = tuple(kind for kind in LEAVES if kind.static)
    parts = (
        MISSED, STRANGE, Tensor, Parameter, Tensor.is_nested, _rows, _plain, _local,
        scopes.scope, scopes.recording, determined, function_modes, is_grad_enabled,
        *SWITCHES, *checkpoints.ASKED, environ, _BACKEND, array_key, bias_key, mask_key, resized,
        Dense, static, OPERATORS, "attention", "sdpa", "paged", "quantized", "BNTH",
    )  # fmt: skip
    try:
        made = door(parts, Key._fields)
    except ValueError:  # sources that build other keys, or another Python's environment
        return None
    table.changed = made.forget
    scopes.tell_armed(made.arm)
    return made


native = _in_native()
"""The functions of the native extension; None where it is not built."""

_best = in_python if native is None else native
attention: Callable[..., Any] = _best.attention
sdpa: Callable[..., Any] = _best.sdpa
drop_in: Callable[..., Any] = _best.drop_in
heard: Callable[..., Any] = _best.heard
paged: Callable[..., Any] = _best.paged
quantized: Callable[..., Any] = _best.quantized
