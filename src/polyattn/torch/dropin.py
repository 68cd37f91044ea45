"""torch's ``scaled_dot_product_attention``: its exact signature and semantics, through polyattn.

What polyattn does not model (nested tensors, tensor subclasses, inputs with other than 3 or 4
dims, broadcasting batches) and what is wrong goes to torch's own function, which computes it or
raises its own error; a recorder notes such calls under the backend name ``torch``. When a backend
is requested, such calls raise instead: a request is never dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _get_deterministic_algorithms, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from polyattn import scopes, settings
from polyattn.biases import DenseBias
from polyattn.errors import Unsupported
from polyattn.masks import Causal, Dense, Mask
from polyattn.selection import Selection, Source
from polyattn.torch import api, traced
from polyattn.torch.door import admit
from polyattn.torch.fastpath import FastTable, tensor_check
from polyattn.torch.resolve import plan_for, wishes

__all__ = ["scaled_dot_product_attention", "torch_sdpa"]

torch_sdpa = torch._C._nn.scaled_dot_product_attention
"""torch's own function, whatever it has been replaced by since."""

_table = FastTable()
_entries = _table.entries
_state = scopes.state
_environ = settings.raw_backend
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
        ambient = api._ambient() if _state.armed else None
        for check, ready, _ in _entries[
            None if attn_mask is None else _mask_key(attn_mask), dropout_p, is_causal, scale,
            enable_gqa, is_grad_enabled(), ambient, _get_deterministic_algorithms(), _environ(),
            _state.epoch,
        ]:  # fmt: skip
            if check(query, key, value):
                run = ready
                break
    except (LookupError, TypeError, AttributeError):
        pass  # a new class of calls, or one for torch itself
    if run is not None:
        return run(query, key, value, attn_mask)  # type: ignore[no-any-return]
    return _long_way(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _mask_key(mask: Tensor) -> Any:
    return mask.shape, mask.dtype, mask.device, mask.requires_grad, type(mask)


def _long_way(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any
) -> Any:
    reason = _beyond(q, k, v, attn_mask, dropout_p, is_causal, scale, gqa)
    if reason is not None:
        _refuse_if_requested(reason)
        selection = Selection("torch", Source.HEURISTIC, reason=reason, version=torch.__version__)
        for ran in scopes.recording.get(()):
            ran.append(selection)
        return torch_sdpa(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=gqa,
        )  # fmt: skip
    options = _options(attn_mask, dropout_p, is_causal, scale)
    if q.dim() == 3:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        return api.attention(q, k, v, **options).squeeze(0)
    out = api.attention(q, k, v, **options)
    if type(q) in api._PLAIN and (attn_mask is None or type(attn_mask) in api._PLAIN):
        _remember(q, k, v, attn_mask, dropout_p, is_causal, scale, gqa, options)
    return out


def _options(attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any) -> dict[str, Any]:
    mask: Mask | None = _CAUSAL if is_causal else None
    bias = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        mask = Dense(attn_mask)
    elif attn_mask is not None:
        bias = DenseBias(attn_mask)
    return {"mask": mask, "bias": bias, "scale": scale, "dropout_p": dropout_p, "layout": "BNTH"}


def _remember(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any,
    gqa: Any, options: dict[str, Any],
) -> None:  # fmt: skip
    """Put the class of this call into the fast table, where no mask object need be checked again."""
    call = admit(q, k, v, **options)
    plan = plan_for(call.problem, wishes(None, None, scopes.current_scope(), scopes.local.module))
    inner = api._runner(plan, call)
    run: Any = inner
    if (
        call.mask is not None
        and attn_mask is not None
        and call.cast is None
        and not call.problem.empty
    ):
        kernel = plan.kernel

        def run(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Any:
            return kernel(q, k, v, Dense(attn_mask), None, None)

    elif attn_mask is not None:

        def run(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Any:
            boolean = attn_mask.dtype == torch.bool
            mask, bias = (Dense(attn_mask), None) if boolean else (None, DenseBias(attn_mask))
            return inner(q, k, v, mask, bias, None)

    local = scopes.local
    ambient = (scopes.scope.get(None), local.traced, local.module) if _state.armed else None
    entry_key = (
        None if attn_mask is None else _mask_key(attn_mask), dropout_p, is_causal, scale, gqa,
        is_grad_enabled(), ambient, _get_deterministic_algorithms(), _environ(), _state.epoch,
    )  # fmt: skip
    if _table.find(entry_key, q, k, v) is None:
        _table.add(entry_key, (tensor_check(q, k, v), run, plan))


def _beyond(
    q: Any, k: Any, v: Any, mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any
) -> str | None:
    """Say why polyattn leaves a call to torch, or None."""
    for x in (q, k, v, *(() if mask is None else (mask,))):
        if type(x) not in api._PLAIN:
            return f"a tensor of type {type(x).__name__}"
        if x.is_nested or x.layout != torch.strided or x.device.type not in ("cpu", "cuda"):
            return f"a {x.layout} tensor on {x.device.type}"
    if torch._C._are_functorch_transforms_active():
        return "a function transform (torch.func) is active"
    if not (q.dim() == k.dim() == v.dim() and q.dim() in (3, 4)):
        return f"inputs of {q.dim()}, {k.dim()} and {v.dim()} dims"
    if q.dtype != k.dtype or q.dtype != v.dtype or q.device != k.device or q.device != v.device:
        return "inputs of several dtypes or devices"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return f"inputs of dtype {q.dtype}"
    if _shapes_beyond(q, k, v, gqa):
        return f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}, enable_gqa={gqa}"
    numbers = [dropout_p, *([] if scale is None else [scale])]
    if any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in numbers):
        return "a dropout_p or scale that is no Python number"
    if not 0.0 <= dropout_p <= 1.0 or type(is_causal) is not bool or type(gqa) is not bool:
        return "options out of range"
    return None if mask is None else _mask_beyond(q, k, mask, is_causal)


def _shapes_beyond(q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> bool:
    heads = k.shape[-3] == v.shape[-3] and (
        q.shape[-3] % max(k.shape[-3], 1) == 0
        if gqa and q.dim() == 4
        else q.shape[-3] == k.shape[-3]
    )
    alike = q.shape[:-3] == k.shape[:-3] == v.shape[:-3] and k.shape[-2] == v.shape[-2]
    sized = min(q.shape[-1], v.shape[-1], k.shape[-3]) > 0
    return not (heads and alike and sized and q.shape[-1] == k.shape[-1])


def _mask_beyond(q: Tensor, k: Tensor, mask: Tensor, is_causal: bool) -> str | None:
    if is_causal:
        return "attn_mask beside is_causal"
    if mask.dtype not in (torch.bool, torch.float32, q.dtype) or mask.device != q.device:
        return f"an attn_mask of dtype {mask.dtype} on {mask.device}"
    full = (*q.shape[:-1], k.shape[-2])
    got = (1,) * (len(full) - mask.dim()) + tuple(mask.shape)
    if mask.dim() not in range(2, len(full) + 1) or any(
        g not in (1, f) for g, f in zip(got, full, strict=True)
    ):
        return f"an attn_mask of shape {tuple(mask.shape)}"
    return None


def _refuse_if_requested(reason: str) -> None:
    asked = wishes(None, None, scopes.current_scope(), scopes.local.module).ordered()
    if asked:
        source, request = asked[0]
        raise Unsupported(
            f"got a call with {reason}, which only torch's own scaled_dot_product_attention can "
            f"take, while {source} asks for {', '.join(request.names)}. Lift the request around "
            "this call, or pass inputs that polyattn models."
        )


def _traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    gqa: Any,
) -> Any:
    """Trace one call; what polyattn does not model stays torch's own operator."""
    plain = (
        q.dim() == 4 and k.dim() == 4 and v.dim() == 4 and not (is_causal and attn_mask is not None)
    )
    if not plain or q.dtype != k.dtype or _shapes_beyond(q, k, v, gqa):
        return torch_sdpa(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=gqa,
        )  # fmt: skip
    options = _options(attn_mask, dropout_p, is_causal, scale)
    return traced.attention(
        q, k, v, options["mask"], options["bias"], scale, None, None, dropout_p, "BNTH", False,
        None, None,
    )  # fmt: skip
