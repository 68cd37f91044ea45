"""torch's ``scaled_dot_product_attention``: its exact signature and semantics, through polyattn.

What polyattn does not model (nested tensors, tensor subclasses, inputs of 2 dims, broadcasting
batches) and what is wrong goes to torch's own function, which computes it or
raises its own error; a recorder notes such calls under the backend name ``torch``. When a backend
is requested, such calls raise instead: a request is never dropped. Kernels that the program has
switched off (``sdpa_kernel(...)``, ``torch.backends.cuda.enable_*_sdp``) are not chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _get_cudnn_sdp_enabled,
    _get_deterministic_algorithms,
    _get_flash_sdp_enabled,
    _get_math_sdp_enabled,
    _get_mem_efficient_sdp_enabled,
    is_grad_enabled,
)
from torch.compiler import is_dynamo_compiling

from polyattn import scopes, settings
from polyattn.biases import DenseBias
from polyattn.choice import Plan, wishes
from polyattn.errors import Unsupported
from polyattn.masks import Causal, Dense, Mask
from polyattn.registry import registry
from polyattn.selection import Selection, Source
from polyattn.torch import recompute, traced
from polyattn.torch.dispatch import around, dispatch, resolve, runner
from polyattn.torch.door import Call
from polyattn.torch.fastpath import FastTable, tensor_check
from polyattn.torch.modelled import beyond, shapes_beyond

__all__ = ["scaled_dot_product_attention", "torch_sdpa"]

torch_sdpa = torch._C._nn.scaled_dot_product_attention
"""torch's own function, whatever it has been replaced by since."""

_table = FastTable()
_entries = _table.entries
_state = scopes.state
_environ, _BACKEND = settings.raw, settings.BACKEND
_recorders = scopes.recording.get
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
    run = None
    try:
        if _state.armed and (_recorders(None) or recompute.is_possible()):
            raise LookupError
        check, run, every = _entries[
            None if attn_mask is None else _mask_key(attn_mask), dropout_p, is_causal, scale,
            enable_gqa, around(), _get_deterministic_algorithms(), _environ(_BACKEND),
            _get_flash_sdp_enabled(), _get_mem_efficient_sdp_enabled(), _get_math_sdp_enabled(),
            _get_cudnn_sdp_enabled(),
        ]  # fmt: skip
        if not check(query, key, value):
            run = next((r for c, r, _ in every if c(query, key, value)), None)
    except (LookupError, TypeError, AttributeError):
        run = None  # a new class of calls, or one for torch itself
    if run is not None:
        return run(query, key, value, attn_mask)  # type: ignore[no-any-return]
    return _long_way(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _mask_key(mask: Tensor) -> Any:
    trains = mask.requires_grad and is_grad_enabled()
    return mask.shape, mask.dtype, mask.device, trains, type(mask)


def _long_way(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any
) -> Any:
    reason = beyond(q, k, v, attn_mask, dropout_p, is_causal, scale, gqa)
    if reason is None:
        try:
            return _modelled(q, k, v, attn_mask, dropout_p, is_causal, scale, gqa)
        except Unsupported:
            if _switched_on() is None or _asked():
                raise
            reason = "torch's own switches leave no kernel for it"
    _refuse_if_requested(reason)
    selection = Selection("torch", Source.HEURISTIC, reason=reason, version=torch.__version__)
    for ran in scopes.recording.get(()):
        ran.append(selection)
    return torch_sdpa(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        enable_gqa=gqa,
    )  # fmt: skip


def _modelled(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any
) -> Any:
    options = _options(attn_mask, dropout_p, is_causal, scale)
    layer = None if _asked() else _switched_on()
    if q.dim() == 3:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        return dispatch(q, k, v, backend=None, layer=layer, **options).squeeze(0)
    if q.dim() > 4:
        lead = q.shape[:-3]
        q, k, v = q.flatten(0, -4), k.flatten(0, -4), v.flatten(0, -4)
        return dispatch(q, k, v, backend=None, layer=layer, **options).unflatten(0, lead)
    out = dispatch(q, k, v, backend=None, layer=layer, **options)
    if torch.is_autocast_enabled(q.device.type):
        return out  # whose dtype the fast table's check does not see
    key = (
        None if attn_mask is None else _mask_key(attn_mask), dropout_p, is_causal, scale, gqa,
        around(), _get_deterministic_algorithms(), _environ(_BACKEND),
        _get_flash_sdp_enabled(), _get_mem_efficient_sdp_enabled(), _get_math_sdp_enabled(),
        _get_cudnn_sdp_enabled(),
    )  # fmt: skip
    if _table.find(key, q, k, v) is None:
        epoch = _state.epoch
        plan, call = resolve(q, k, v, None, layer, options)
        _table.add(key, (tensor_check(q, k, v), _mask_runner(plan, call, attn_mask), plan), epoch)
    return out


def _switched_on() -> frozenset[str] | None:
    """Return the kernels that torch's own switches leave, or None when all are on.

    A program that turns kernels off, as ``torch.nn.attention.sdpa_kernel`` does, is obeyed.
    """
    switches = {
        "sdpa_flash": _get_flash_sdp_enabled(),
        "sdpa_efficient": _get_mem_efficient_sdp_enabled(),
        "sdpa_math": _get_math_sdp_enabled(),
        "sdpa_cudnn": _get_cudnn_sdp_enabled(),
    }
    return None if all(switches.values()) else frozenset(n for n, on in switches.items() if on)


def _asked() -> tuple[Any, ...]:
    """Return the requests in force here, strongest first: they outrank torch's switches."""
    return wishes(None, None, scopes.current_scope(), scopes.local.module).ordered()


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


def _mask_runner(plan: Plan, call: Call, attn_mask: Tensor | None) -> Any:
    """Return ``run(q, k, v, attn_mask)``; a mask of a known shape need not be checked again."""
    inner, kernel = runner(plan, call), plan.kernel
    if attn_mask is None:
        return inner
    if call.mask is not None and call.cast is None and not call.problem.empty:
        return lambda q, k, v, mask: kernel(q, k, v, Dense(mask), None, None)
    if attn_mask.dtype == torch.bool:
        return lambda q, k, v, mask: inner(q, k, v, Dense(mask), None, None)
    return lambda q, k, v, mask: inner(q, k, v, None, DenseBias(mask), None)


def _refuse_if_requested(reason: str) -> None:
    _refuse(reason, scopes.current_scope(), scopes.local.module)


def _refuse(reason: str, scope: str | None, module: str | None) -> None:
    """Raise Unsupported if a request is in force that torch's own choice might go against."""
    wanted = wishes(None, None, scope, module)
    asked = [(str(source), ", ".join(request.names)) for source, request in wanted.ordered()]
    barred = [name for name in wanted.scope.never if name in registry.groups()["torch_sdpa"]]
    if barred:
        asked.append(("SCOPE", f"never {', '.join(barred)}"))
    if asked:
        source, names = asked[0]
        raise Unsupported(
            f"got a call with {reason}, which only torch's own scaled_dot_product_attention can "
            f"take, while {source} asks for {names}. Lift the request around this call, or pass "
            "inputs that polyattn models."
        )


def _traced_switches() -> tuple[str, ...] | None:
    layer = _switched_on()
    return None if layer is None else tuple(sorted(layer))


# read while tracing, as the switches stand then: what torch's own function does when compiled
_traced_switches._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _refuse_traced(scope: str | None, module: str | None, epoch: str) -> None:
    _refuse("inputs that are not modelled inside torch.compile", scope, module)


_refuse_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _traced(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any,
    gqa: Any,
) -> Any:  # fmt: skip
    """Trace one call; what polyattn does not model stays torch's own operator, unless asked."""
    plain = q.dim() == k.dim() == v.dim() and q.dim() >= 3
    if attn_mask is not None:
        plain = plain and not is_causal and (q.dim() <= 4 or attn_mask.dim() <= 3)
    if not plain or q.dtype != k.dtype or shapes_beyond(q, k, v, gqa):
        scope = _state.scope
        scope = scopes.local.traced or (None if scope is _state else scope)
        _refuse_traced(scope, scopes.local.module, _state.epoch)
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
        None, None, _traced_switches(),
    )  # fmt: skip
    if len(lead) == 1:
        return out
    return out.unflatten(0, lead) if lead else out.squeeze(0)
