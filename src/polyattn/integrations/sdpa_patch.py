"""Any program's ``torch.nn.functional.scaled_dot_product_attention``, run by polyattn.

While a :class:`route_sdpa` is entered, in all threads, every module that holds torch's function
under any name holds :func:`routed` instead; afterwards each holds what it held before. What
polyattn does not model still goes to torch's own function. Not reached: references that live in
no module's namespace (default arguments, closures), the fused eval path of
``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention``, which calls no attention function at
all, and traced code (``torch.jit``), which keeps torch's operator.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function

from polyattn.selection import Selection, scopes
from polyattn.selection.requests import use_backend
from polyattn.torch import dropin
from polyattn.torch.cache import PLAIN
from polyattn.torch.dropin import scaled_dot_product_attention as attend
from polyattn.torch.internals import (
    OPERATORS_MODULE,
    forget_jit_builtin,
    inline_as,
    register_jit_builtin,
    replace_operator,
    torch_sdpa,
    tracing_state,
)

__all__ = ["Listener", "SdpaCall", "route_sdpa", "routed"]


class SdpaCall(NamedTuple):
    """The arrays of one call, as the program passed them."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any


class Listener(Protocol):
    """Hears what each call ran on."""

    def ran(self, selection: Selection, call: SdpaCall | None) -> None:
        """A call ran; `call` is None where its arrays cannot be seen (in compiled code)."""

    def passed(self, reason: str, call: SdpaCall | None) -> None:
        """A call went to torch itself, because polyattn does not model it."""


class _Compiled:
    """A recorder (see `polyattn.selection.scopes`) of calls that do not come through `routed`."""

    def append(self, selection: Selection) -> None:
        _tell([selection], None)


class _Router:
    """What is replaced at present, and who listens."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth = 0
        self.listeners: tuple[Listener, ...] = ()
        self.replaced: Any = None
        self.scopes: tuple[str, ...] = ()  # for threads, which begin without any scope

    def enter(self, listener: Listener | None, scope: str | None) -> None:
        with self.lock:
            self.depth += 1
            self.scopes = (*self.scopes, scope or (self.scopes[-1] if self.scopes else ""))
            if listener is not None:
                self.listeners = (*self.listeners, listener)
                scopes.record(1)  # calls look for recorders
            if self.depth == 1:
                self.replaced = torch.nn.functional.scaled_dot_product_attention
                register_jit_builtin(routed, _ATEN)
                self._put_in_place()

    def leave(self, listener: Listener | None) -> None:
        with self.lock:
            self.depth -= 1
            self.scopes = self.scopes[:-1]
            if listener is not None:
                scopes.record(-1)
                kept = list(self.listeners)
                kept.remove(listener)
                self.listeners = tuple(kept)
            if self.depth == 0:
                _swap(routed, self.replaced)
                _swap(_routed_operator, torch_sdpa)
                forget_jit_builtin(routed)

    def _put_in_place(self) -> None:
        _swap(self.replaced, routed)
        # compilers look torch's operator up under this name: see _routed_operator
        replace_operator(routed, _routed_operator)


_router = _Router()
_ATEN = "aten::scaled_dot_product_attention"
_KEPT = ("torch._", "torch.overrides", "torch.fx", "torch.jit", "polyattn")


def _swap(old: Any, new: Any) -> None:
    """Put `new` wherever a module's namespace holds `old`; torch's inner tables are left alone."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_KEPT) and name != OPERATORS_MODULE:
            continue
        held = getattr(module, "__dict__", None)
        if not isinstance(held, dict):
            continue
        for key, value in list(held.items()):
            if value is old:
                setattr(module, key, new)


def routed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What stands in for torch's ``scaled_dot_product_attention`` while it is routed."""
    if is_dynamo_compiling():
        return dropin.trace(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    arrays = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if has_torch_function(arrays) or tracing_state() is not None or type(query) not in PLAIN:
        options = attn_mask, dropout_p, is_causal, scale, enable_gqa
        return _foreign(arrays, query, key, value, *options)
    if _router.scopes and _router.scopes[-1] and scopes.current_scope() is None:
        return _scoped(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if _router.listeners:
        return _heard(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return attend(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _routed_operator(*args: Any, **kwargs: Any) -> Any:
    """Stands in for ``torch._C._nn.scaled_dot_product_attention``; compilers see through it.

    torch's compiler resolves its table of known operators by name when it is first used; the
    attribute below makes it find the operator itself there.
    """
    return routed(*args, **kwargs)


inline_as(_routed_operator, torch_sdpa)


def _foreign(arrays: tuple[Any, ...], query: Any, key: Any, value: Any, *options: Any) -> Any:
    """Leave tensor subclasses and traces to torch, as without polyattn; let function modes see."""
    own = [x for x in arrays if type(x) not in PLAIN]
    if own and not any(type(x).__name__ == "FakeTensor" for x in own):  # those only look
        kinds = ", ".join(sorted({type(x).__name__ for x in own}))
        _pass(f"a tensor of type {kinds}", SdpaCall(query, key, value, options[0]))
    elif tracing_state() is not None:
        _pass("torch.jit tracing it", SdpaCall(query, key, value, options[0]))
    elif has_torch_function(arrays):
        attn_mask, dropout_p, is_causal, scale, enable_gqa = options
        return handle_torch_function(
            routed, arrays, query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip
    return dropin.stock(query, key, value, *options)


def _pass(reason: str, call: SdpaCall) -> None:
    outer = [r for r in scopes.recording.get(()) if not isinstance(r, _Compiled)]
    token = scopes.recording.set(tuple(outer))
    try:
        dropin.hand_to_torch(reason)
    finally:
        scopes.recording.reset(token)
    _tell_passed(reason, call)


def _scoped(*args: Any) -> Any:
    """Run under the routing's request, in a thread that began without it."""
    before = scopes.enter(_router.scopes[-1])
    try:
        return routed(*args[:-2], scale=args[-2], enable_gqa=args[-1])
    finally:
        scopes.leave(before)


def _heard(query: Any, key: Any, value: Any, attn_mask: Any, *options: Any) -> Any:
    """Run, and tell the listeners of this call only."""
    heard: list[Selection] = []
    outer = (r for r in scopes.recording.get(()) if not isinstance(r, _Compiled))
    token = scopes.recording.set((*outer, heard))
    try:
        dropout_p, is_causal, scale, gqa = options
        return attend(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=gqa
        )
    finally:
        scopes.recording.reset(token)
        _tell(heard, SdpaCall(query, key, value, attn_mask))


def _tell(heard: Sequence[Selection], call: SdpaCall | None) -> None:
    for selection in heard:
        if selection.problem is None:
            _tell_passed(selection.reason, call)
            continue
        for listener in _router.listeners:
            listener.ran(selection, call)


def _tell_passed(reason: str, call: SdpaCall | None) -> None:
    for listener in _router.listeners:
        listener.passed(reason, call)


def _record(outer: tuple[Any, ...]) -> tuple[Any, Any]:
    """Record what compiled code runs in this context."""
    return scopes.recording.set((*outer, _Compiled())), scopes.recorded.set("recorded")


class route_sdpa(AbstractContextManager["route_sdpa"]):
    """Route torch's ``scaled_dot_product_attention`` through polyattn within a ``with`` block.

    Nests, may be entered again, holds for all threads; the outermost exit restores every
    reference. A `listener` hears what each call ran on (of compiled code: of this context).
    A `request` holds in all threads that are under no request of their own.

    >>> import torch
    >>> before = torch.nn.functional.scaled_dot_product_attention
    >>> with route_sdpa():
    ...     routed is torch.nn.functional.scaled_dot_product_attention
    True
    >>> before is torch.nn.functional.scaled_dot_product_attention
    True
    """

    def __init__(
        self, listener: Listener | None = None, request: use_backend | None = None
    ) -> None:
        self._listener, self._request = listener, request
        self._tokens: list[Any] = []

    def __enter__(self) -> route_sdpa:
        scope = None
        if self._request is not None:
            self._request.__enter__()
            scope = scopes.current_scope()
        _router.enter(self._listener, scope)
        outer = scopes.recording.get(())
        fresh = self._listener is not None and not any(isinstance(r, _Compiled) for r in outer)
        self._tokens.append(_record(outer) if fresh else None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        tokens = self._tokens.pop()
        if tokens is not None:
            scopes.recorded.reset(tokens[1])
            scopes.recording.reset(tokens[0])
        _router.leave(self._listener)
        if self._request is not None:
            self._request.__exit__(kind, error, trace)
