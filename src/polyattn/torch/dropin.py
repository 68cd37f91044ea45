"""torch's ``scaled_dot_product_attention``: its exact signature and semantics, through polyattn.

A translation in front of the one table and the one admission. What polyattn does not model (nested
tensors, tensor subclasses, inputs of 2 dims, broadcasting batches) and what is wrong goes to
torch's own function, which computes it or raises its own error; a recorder notes such calls under
the backend name ``torch``. When a backend is requested, such calls raise instead, unless the
request allows a fallback (``on_unsupported="fallback"``), which is then noted. Kernels that the
program has switched off (``sdpa_kernel(...)``, ``torch.backends.cuda.enable_*_sdp``) are not
chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function

from polyattn import settings
from polyattn.errors import Unsupported
from polyattn.masks import Causal, Dense, Mask
from polyattn.masks.biases import DenseBias
from polyattn.problem.admission import ArrayFacts, SdpaFacts, only_torch
from polyattn.selection import scopes
from polyattn.selection.wishes import Wishes, current_wishes, wishes_of
from polyattn.torch import jagged, short_way, traced
from polyattn.torch.admission import cast_alike, facts_of
from polyattn.torch.api import attention
from polyattn.torch.cache import PLAIN
from polyattn.torch.call_model import facts_of as facts_of_model
from polyattn.torch.call_model import model_of_sdpa
from polyattn.torch.internals import (
    are_overrides_on,
    are_transforms_active,
    break_graph,
    function_modes,
    is_compiler_loaded,
    mark_constant,
    present_operator,
    register_jit_builtin,
    torch_sdpa,
    tracing_state,
)
from polyattn.torch.keys import Key, key_for, switches
from polyattn.torch.left_to_torch import hand_to_torch, noted_for_torch, traced_scope
from polyattn.torch.long_way import AttentionWay, dispatch
from polyattn.torch.sdpa_way import SdpaWay
from polyattn.torch.traced_problem import as_text, from_text

__all__ = [
    "known_as",
    "reason_of_nested",
    "scaled_dot_product_attention",
    "stock",
    "takes_jagged",
    "torch_sdpa",
    "trace",
]

_state = scopes.state
_MISSED = short_way.MISSED
_CAUSAL = Causal("top_left")
_NAME = "scaled_dot_product_attention"


def scaled_dot_product_attention(
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
    """Do what ``torch.nn.functional.scaled_dot_product_attention`` does, on the best backend.

    `query` (..., N, T, H), `key` (..., K, S, H), `value` (..., K, S, V); `attn_mask` broadcasts
    to (..., N, T, S), boolean (True = attend) or additive; ``is_causal`` is top-left aligned.
    Source: https://pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html

    >>> import torch
    >>> q = torch.randn(2, 8, 16, 64)
    >>> ours = scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> torch.allclose(ours, torch_sdpa(q, q, q, is_causal=True), atol=1e-6)
    True
    """
    if is_dynamo_compiling():
        return trace(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    found = short_way.drop_in(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if found is not _MISSED:
        return found  # type: ignore[no-any-return]
    modes = function_modes()
    if modes and has_torch_function((query,)):  # not below one that is being asked
        return handle_torch_function(  # type: ignore[no-any-return]
            scaled_dot_product_attention, (query, key, value), query, key, value, attn_mask,
            dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
    if attn_mask is not None and _is_torchs(attn_mask):
        return torch_sdpa(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if modes:  # in vain, where they are switched off
        found = short_way.sdpa(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        if found is not _MISSED:
            return found  # type: ignore[no-any-return]
    options = attn_mask, dropout_p, is_causal, scale, enable_gqa
    held = key_for(query, key, value, Key.of_sdpa, *options)
    return _long_way(held, query, key, value, *options)


# what torch.jit scripts keeps torch's operator: this function is none that it could compile
register_jit_builtin(scaled_dot_product_attention, f"aten::{_NAME}")


_ARRAY = "an array as the mask on CUDA"
"""Without a request torch's own function runs it: to keep NaN from what is masked, as polyattn
promises, keys and values are copied there: up to several times the time of the kernel."""


def _is_torchs(mask: Any) -> bool:
    """Say at once whether a call with this mask is torch's own, where nobody asks or records."""
    return (
        type(mask) in PLAIN
        and mask.is_cuda
        and not _state.armed
        and settings.raw(settings.BACKEND) is None
    )


def _long_way(
    key: Key | None,
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    gqa: Any,
) -> Any:
    arguments = q, k, v, attn_mask, dropout_p, is_causal, scale, gqa
    if takes_jagged(*arguments):
        return attention(q, k, v, mask=_CAUSAL if is_causal else None, scale=scale, layout="BNTH")
    reason = _beyond(*arguments)
    if reason is None:
        try:
            return _modelled(key, *arguments)
        except Unsupported:
            if switches() is None or _asked():
                raise
            reason = "torch's own switches leave no kernel for it"
    hand_to_torch(reason)
    return stock(*arguments)


def takes_jagged(q: Any, k: Any, v: Any, *options: Any) -> bool:
    """Say whether it is a call of jagged tensors that polyattn models."""
    return jagged.is_any_nested(q, k, v) and jagged.only_torch(q, k, v, *options) is None


def reason_of_nested(q: Any, k: Any, v: Any, *options: Any) -> str | None:
    """Say why a call with nested tensors is left to torch; None where it is not, or has none."""
    return jagged.only_torch(q, k, v, *options) if jagged.is_any_nested(q, k, v) else None


def stock(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any
) -> Any:
    """Call torch's own function; tensor subclasses may take the call, as without polyattn."""
    options = {
        "attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
        "enable_gqa": gqa,
    }  # fmt: skip
    arrays = (q, k, v) if attn_mask is None else (q, k, v, attn_mask)
    if not (are_overrides_on() and has_torch_function(arrays)):
        return torch_sdpa(q, k, v, **options)
    kinds = tuple([type(x) for x in arrays if type(x) not in PLAIN])
    function = known_as(kinds)
    if is_dynamo_compiling():
        if function is torch_sdpa:  # which compilers dispatch by themselves
            return torch_sdpa(q, k, v, **options)
        # a CausalBias calls on with plain tensors
        if "torch.nn.attention.bias" in [kind.__module__ for kind in kinds]:
            return handle_torch_function(function, arrays, q, k, v, **options)
        break_graph()
    override = handle_torch_function
    if is_compiler_loaded():  # a graph of what calls on with itself would override again
        override = torch.compiler.disable(override)
    return override(function, arrays, q, k, v, **options)


def known_as(kinds: tuple[Any, ...]) -> Callable[..., Any]:
    """Return what tensor subclasses know torch's function as: what ``__torch_function__`` is given.

    Some compare it with what stands in torch's namespaces at present, which this function may have
    replaced; others keep it in tables or graphs, and these hold torch's.
    """
    for kind in kinds:
        if kind.__module__.startswith("torch.nested"):
            return present_operator()
        code = getattr(kind.__torch_function__, "__code__", None)
        if code is not None and _NAME in code.co_names:
            return F.scaled_dot_product_attention
    return torch_sdpa


def _beyond(
    q: Any, k: Any, v: Any, mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any
) -> str | None:
    """Say why polyattn leaves a call to torch, or None."""
    if nested := reason_of_nested(q, k, v, mask, dropout_p, is_causal, scale, gqa):
        return nested
    for x in (q, k, v, *(() if mask is None else (mask,))):
        if type(x) not in PLAIN:
            return f"a tensor of type {type(x).__name__}"
    if are_transforms_active():
        return "a function transform (torch.func) around it"
    if tracing_state() is not None:
        return "torch.jit tracing it"
    q, k, v, mask = (None if x is None else facts_of(x) for x in (q, k, v, mask))
    q, k, v = cast_alike(q, k, v)
    reason = only_torch(SdpaFacts(q, k, v, mask, dropout_p, is_causal, scale, gqa))
    return reason or _of_array(mask, current_wishes())


def _of_array(mask: ArrayFacts | None, wishes: Wishes) -> str | None:
    """Say that a mask is an array on a GPU, which is torch's own unless somebody asks otherwise."""
    if mask is None or mask.device_type != "cuda" or wishes.ordered() or wishes.scope.never:
        return None
    return _ARRAY


def _modelled(
    key: Key | None,
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    gqa: Any,
) -> Any:
    options = _options(attn_mask, dropout_p, is_causal, scale)
    if q.dim() == 4:
        way = SdpaWay(options, attn_mask)
        return dispatch(way, key, q, k, v, (attn_mask,), None)
    lead = q.shape[:-3]
    if q.dim() == 3:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    else:
        q, k, v = q.flatten(0, -4), k.flatten(0, -4), v.flatten(0, -4)
    mask, bias = options["mask"], options["bias"]
    four = Key.of(q, k, mask, bias, scale, None, None, dropout_p, "BNTH", False, None, None)
    out = dispatch(AttentionWay(options), four, q, k, v, (mask, bias, None), None)
    out = out.contiguous()  # as torch's own, which runs its unfused path for these
    return out.unflatten(0, lead) if lead else out.squeeze(0)


def _asked() -> tuple[Any, ...]:
    """Return the requests in force here, strongest first: they outrank torch's switches."""
    return current_wishes().ordered()


def _options(attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any) -> dict[str, Any]:
    mask: Mask | None = _CAUSAL if is_causal else None
    bias = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        mask = Dense(attn_mask)
    elif attn_mask is not None:
        bias = DenseBias(attn_mask)
    return {
        "mask": mask, "bias": bias, "scale": scale, "softcap": None, "sinks": None,
        "dropout_p": dropout_p, "layout": "BNTH", "return_lse": False, "deterministic": None,
    }  # fmt: skip


def _left_to_torch(model: Any, scope: str | None, module: str | None, epoch: str) -> int:
    """Return -1 for a traced call that polyattn models, else the number under which it is noted.

    A call that a request forbids to leave raises. Of a model's sizes only which are equal is known.
    """
    reason = model if isinstance(model, str) else _reason_of_model(model, scope, module)
    if reason is None:
        return -1
    return noted_for_torch(reason, scope, module)


mark_constant(_left_to_torch)


def _reason_of_model(model: Any, scope: str | None, module: str | None) -> str | None:
    facts = _sdpa_facts(model)
    reason = only_torch(facts, exact=False)
    return reason or _of_array(facts.attn_mask, wishes_of(None, None, scope, module))


def _sdpa_facts(model: Any) -> SdpaFacts:
    q, k, v, mask, dropout_p, is_causal, scale, gqa = model
    q, k, v, mask = (None if x is None else facts_of_model(x) for x in (q, k, v, mask))
    dropout_p, scale = from_text(dropout_p), from_text(scale)
    q, k, v = cast_alike(q, k, v)
    return SdpaFacts(q, k, v, mask, dropout_p, is_causal, scale, gqa)


def _decided(flag: Any) -> Any:
    """Return a flag as a constant: compared from symbolic sizes it is a symbol, which none is."""
    if type(flag) is not bool:
        return flag
    return True if flag else False  # noqa: SIM210  # bool(flag) remains a symbol


def trace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    gqa: Any,
) -> Any:
    """Trace one call; what polyattn does not model is left to torch's own operator."""
    scope, is_causal, gqa = traced_scope(), _decided(is_causal), _decided(gqa)
    p_text, scale_text = as_text(dropout_p), as_text(scale)
    model = model_of_sdpa(q, k, v, attn_mask, p_text, is_causal, scale_text, gqa)
    if isinstance(model, str) and takes_jagged(
        q, k, v, attn_mask, dropout_p, is_causal, scale, gqa
    ):
        return attention(q, k, v, mask=_CAUSAL if is_causal else None, scale=scale, layout="BNTH")
    number = _left_to_torch(model, scope, scopes.local.module, _state.epoch)
    if number >= 0:
        traced.note(number)
        typed = isinstance(dropout_p, (int, float)) and isinstance(scale, (int, float, NoneType))
        typed = typed and type(is_causal) is bool and type(gqa) is bool
        if isinstance(model, str) or not typed:
            return stock(q, k, v, attn_mask, dropout_p, is_causal, scale, gqa)
        # an operator that generated code does not look up under the name that routing replaces
        return torch.ops.aten.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=gqa,
        )
    lead = q.shape[:-3]
    if q.dim() == 3:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    elif q.dim() > 4:
        q, k, v = q.flatten(0, -4), k.flatten(0, -4), v.flatten(0, -4)
    options = _options(attn_mask, dropout_p, is_causal, scale)
    out = traced.attention(
        q, k, v, options["mask"], options["bias"], scale, None, None, dropout_p, "BNTH", False,
        None, None,
    )  # fmt: skip
    if len(lead) == 1:
        return out
    out = out.contiguous()  # as torch's own
    return out.unflatten(0, lead) if lead else out.squeeze(0)
