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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from polyattn import scopes
from polyattn.admission import SdpaFacts, only_torch
from polyattn.biases import DenseBias
from polyattn.choice import Plan, current_wishes, wishes
from polyattn.errors import Unsupported
from polyattn.masks import Causal, Dense, Mask
from polyattn.registry import registry
from polyattn.selection import Selection, Source
from polyattn.torch import short, traced
from polyattn.torch.cache import PLAIN, Key, key_for, switches
from polyattn.torch.dispatch import AttentionWay, dispatch, runner
from polyattn.torch.door import Call, admit, facts_of
from polyattn.torch.model import facts_of as facts_of_model
from polyattn.torch.model import model_of_sdpa

__all__ = ["hand_to_torch", "scaled_dot_product_attention", "torch_sdpa"]

torch_sdpa = torch._C._nn.scaled_dot_product_attention
"""torch's own function, whatever it has been replaced by since."""

_state = scopes.state
_MISSED = short.MISSED
_CAUSAL = Causal("top_left")


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
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
        return _traced(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    found = short.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if found is not _MISSED:
        return found  # type: ignore[no-any-return]
    options = attn_mask, dropout_p, is_causal, scale, enable_gqa
    held = key_for(query, key, value, Key.of_sdpa, *options)
    return _long_way(held, query, key, value, *options)


@dataclass(frozen=True)
class _SdpaWay:
    """Calls with torch's signature and four dims; runners take the mask as it came."""

    attn_mask: Any
    options: dict[str, Any]

    def admit(self, q: Any, k: Any, v: Any) -> Call:
        return admit(q, k, v, **self.options)

    def runner(self, plan: Plan, call: Call) -> Callable[..., Any]:
        """Return ``run(q, k, v, attn_mask)``; a mask of a known shape need not be checked again."""
        inner, kernel = runner(plan, call), plan.kernel
        if self.attn_mask is None:
            return inner
        if call.mask is not None and call.cast is None and not call.problem.empty:
            return lambda q, k, v, mask: kernel(q, k, v, Dense(mask), None, None)
        if self.attn_mask.dtype == torch.bool:
            return lambda q, k, v, mask: inner(q, k, v, Dense(mask), None, None)
        return lambda q, k, v, mask: inner(q, k, v, None, DenseBias(mask), None)


def _long_way(
    key: Key | None, q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: Any, is_causal: Any,
    scale: Any, gqa: Any,
) -> Any:  # fmt: skip
    arguments = q, k, v, attn_mask, dropout_p, is_causal, scale, gqa
    reason = _beyond(*arguments)
    if reason is None:
        try:
            return _modelled(key, *arguments)
        except Unsupported:
            if switches() is None or _asked():
                raise
            reason = "torch's own switches leave no kernel for it"
    hand_to_torch(reason)
    return torch_sdpa(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        enable_gqa=gqa,
    )  # fmt: skip


def _beyond(
    q: Any, k: Any, v: Any, mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any
) -> str | None:
    """Say why polyattn leaves a call to torch, or None."""
    for x in (q, k, v, *(() if mask is None else (mask,))):
        if type(x) not in PLAIN:
            return f"a tensor of type {type(x).__name__}"
    if torch._C._are_functorch_transforms_active():
        return "a function transform (torch.func) is active"
    q, k, v, mask = (None if x is None else facts_of(x) for x in (q, k, v, mask))
    return only_torch(SdpaFacts(q, k, v, mask, dropout_p, is_causal, scale, gqa))


def _modelled(
    key: Key | None, q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: Any, is_causal: Any,
    scale: Any, gqa: Any,
) -> Any:  # fmt: skip
    options = _options(attn_mask, dropout_p, is_causal, scale)
    if q.dim() == 4:
        way = _SdpaWay(attn_mask, options)
        return dispatch(way, key, q, k, v, (attn_mask,), None)
    lead = q.shape[:-3]
    if q.dim() == 3:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    else:
        q, k, v = q.flatten(0, -4), k.flatten(0, -4), v.flatten(0, -4)
    mask, bias = options["mask"], options["bias"]
    four = Key.of(mask, bias, scale, None, None, dropout_p, "BNTH", False, None, None)
    out = dispatch(AttentionWay(options), four, q, k, v, (mask, bias, None), None)
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


def hand_to_torch(reason: str) -> None:
    """Note that torch's own function runs a call, or raise Unsupported if a request forbids."""
    fallback = _refused(reason, scopes.current_scope(), scopes.local.module)
    selection = Selection(
        "torch", Source.HEURISTIC, reason=reason, version=torch.__version__, fallback=fallback
    )
    for ran in scopes.recording.get(()):
        ran.append(selection)


def _refused(reason: str, scope: str | None, module: str | None) -> str | None:
    """Return which request gives way to torch's own choice, if one does; raise if it may not."""
    wanted = wishes(None, None, scope, module)
    asked = [(str(source), ", ".join(request.names)) for source, request in wanted.ordered()]
    barred = [name for name in wanted.scope.never if name in registry.groups()["torch_sdpa"]]
    if barred:
        asked.append(("SCOPE", f"never {', '.join(barred)}"))
    if not asked:
        return None
    source, names = asked[0]
    request = wanted.ordered()[0][1] if wanted.ordered() else wanted.scope
    policy = request.on_unsupported or wanted.scope.on_unsupported or wanted.on_unsupported
    if policy == "fallback" and not barred:
        return f"{source} asked for {names}, which cannot run it: {reason}"
    raise Unsupported(
        f"got a call with {reason}, which only torch's own scaled_dot_product_attention can "
        f"take, while {source} asks for {names}. Lift the request around this call, allow torch to "
        'step in with on_unsupported="fallback", or pass inputs that polyattn models.'
    )


def _traced_reason(model: Any, scope: str | None, module: str | None, epoch: str) -> str | None:
    """Say why a traced call stays torch's; raise if a request in force forbids that."""
    reason = model if isinstance(model, str) else only_torch(_sdpa_facts(model))
    if reason is not None:
        try:
            _refused(reason, scope, module)
        except Unsupported as error:
            raise traced.through_compiler(error) from None
    return reason


_traced_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _sdpa_facts(model: Any) -> SdpaFacts:
    q, k, v, mask, dropout_p, is_causal, scale, gqa = model
    q, k, v, mask = (None if x is None else facts_of_model(x) for x in (q, k, v, mask))
    dropout_p, scale = traced.from_text(dropout_p), traced.from_text(scale)
    return SdpaFacts(q, k, v, mask, dropout_p, is_causal, scale, gqa)


def _traced(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any,
    gqa: Any,
) -> Any:  # fmt: skip
    """Trace one call; what polyattn does not model stays torch's own operator, unless asked."""
    scope = _state.scope
    scope = scopes.local.traced or (None if scope is _state else scope)
    p_text, scale_text = traced.as_text(dropout_p), traced.as_text(scale)
    model = model_of_sdpa(q, k, v, attn_mask, p_text, is_causal, scale_text, gqa)
    if _traced_reason(model, scope, scopes.local.module, _state.epoch) is not None:
        return torch_sdpa(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=gqa,
        )  # fmt: skip
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
    return out.unflatten(0, lead) if lead else out.squeeze(0)
