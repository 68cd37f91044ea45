"""Any program's ``torch.nn.functional.scaled_dot_product_attention``, run by polyattn.

While a :class:`route_sdpa` is entered, in all threads, every module that holds torch's function
under any name holds :func:`routed` instead; afterwards each holds what it held before. What
polyattn does not model still goes to torch's own function. The fused paths of
``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` are routed likewise
(`polyattn.integrations.fused_layers`), and ``flex_attention`` (`polyattn.integrations.flex_calls`).
What is not reached, and why, is a page of the book.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function

from polyattn.integrations import flex_calls as _flex_calls  # noqa: F401 - adds its seam
from polyattn.integrations import fused_layers as _fused_layers  # noqa: F401 - adds its seams
from polyattn.integrations import grouped_heads as _grouped_heads  # noqa: F401 - adds its seam
from polyattn.integrations.routing import Compiled, Listener, SdpaCall, Seam, router
from polyattn.selection import scopes
from polyattn.selection.requests import use_backend
from polyattn.torch import dropin, short_way
from polyattn.torch.cache import PLAIN
from polyattn.torch.dropin import scaled_dot_product_attention as attend
from polyattn.torch.internals import inline_as, torch_sdpa, tracing_state

__all__ = ["Listener", "SdpaCall", "route_sdpa", "routed"]


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
    """What stands in for torch's ``scaled_dot_product_attention`` while it is routed.

    Where a program kept it, it is torch's function when no routing is entered.
    """
    if not is_dynamo_compiling() and (router.is_quick or router.quick):
        way = short_way.drop_in if router.is_quick else _heard
        found = way(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if found is not short_way.MISSED:
            return found  # type: ignore[no-any-return]
    if not router.entered:
        return torch_sdpa(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if is_dynamo_compiling():
        return dropin.trace(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    arrays = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if has_torch_function(arrays) or tracing_state() is not None or type(query) not in PLAIN:
        options = attn_mask, dropout_p, is_causal, scale, enable_gqa
        if not dropin.takes_jagged(query, key, value, *options):
            return _foreign(arrays, query, key, value, *options)
    if not router.listeners and not ((held := router.scopes) and held[-1]):
        return attend(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    run = functools.partial(
        attend, query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
        enable_gqa=enable_gqa,
    )  # fmt: skip
    # sizes of jagged tensors are no numbers
    call = None if query.is_nested else SdpaCall(query, key, value, attn_mask)
    return router.run(call, run)


def _heard(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any,
    gqa: Any,
) -> Any:  # fmt: skip
    """Run a call and tell the listeners, or return that it was missed."""
    listeners = router.quick
    found = short_way.heard(
        query, key, value, attn_mask, dropout_p, is_causal, scale, gqa, Compiled
    )
    if found is short_way.MISSED:
        return found
    selection, out = found
    call = SdpaCall(query, key, value, attn_mask)
    for listener in listeners:
        listener.ran_of_class(selection, call)
    return out


def _routed_operator(*args: Any, **kwargs: Any) -> Any:
    """Stands in for ``torch._C._nn.scaled_dot_product_attention``; compilers see through it.

    torch's compiler resolves its table of known operators by name when it is first used; the mark
    below makes it find the operator itself there.
    """
    return routed(*args, **kwargs)


inline_as(_routed_operator, torch_sdpa)
router.add(
    Seam(
        lambda: torch.nn.functional.scaled_dot_product_attention,
        routed,
        operator="aten::scaled_dot_product_attention",
        seen_through=False,
        for_compilers=_routed_operator,
        home="torch.nn.functional",
    )
)


def _foreign(arrays: tuple[Any, ...], query: Any, key: Any, value: Any, *options: Any) -> Any:
    """Leave tensor subclasses and traces to torch, as without polyattn; let function modes see."""
    own = [x for x in arrays if type(x) not in PLAIN]
    call = SdpaCall(query, key, value, options[0])
    if own and not any(type(x).__name__ == "FakeTensor" for x in own):  # those only look
        kinds = ", ".join(sorted({type(x).__name__ for x in own}))
        reason = dropin.reason_of_nested(query, key, value, *options)
        router.hand_over(reason or f"a tensor of type {kinds}", call)
    elif tracing_state() is not None:
        router.hand_over("torch.jit tracing it", call)
    elif has_torch_function(arrays):
        attn_mask, dropout_p, is_causal, scale, enable_gqa = options
        return handle_torch_function(
            routed, arrays, query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip
    return dropin.stock(query, key, value, *options)


def _record(outer: tuple[Any, ...]) -> tuple[Any, Any]:
    """Record what compiled code runs in this context."""
    return scopes.recording.set((*outer, Compiled())), scopes.recorded.set("recorded")


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
        try:
            router.enter(self._listener, scope)
        except BaseException:  # an interrupt
            if self._request is not None:
                self._request.__exit__(None, None, None)
            raise
        outer = scopes.recording.get(())
        fresh = self._listener is not None and not any(isinstance(r, Compiled) for r in outer)
        self._tokens.append(_record(outer) if fresh else None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        tokens = self._tokens.pop()
        try:
            if tokens is not None:
                scopes.put_back(scopes.recorded, tokens[1], "")
                scopes.put_back(scopes.recording, tokens[0], ())
            router.leave(self._listener)
        finally:
            if self._request is not None:
                self._request.__exit__(kind, error, trace)
