"""``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` in inference, while routed.

In inference these layers call no attention function but one operator for the whole layer, which
materialises the scores. Its stand-ins here take the same steps around a kernel of polyattn's, where
that is worth it, and otherwise hand the call to torch's operator and say why. Each call is decided
by itself, and gives what the operator gives but for rounding.

Compiled code keeps torch's operators: compilers look them up by name, and see through these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from polyattn.integrations.layer_masks import mask_of
from polyattn.integrations.routing import SdpaCall, Seam, router
from polyattn.masks import Mask, Packed
from polyattn.problem import DTYPES
from polyattn.torch.api import attention
from polyattn.torch.cache import PLAIN
from polyattn.torch.internals import (
    are_transforms_active,
    fused_attention,
    fused_encoder_layer,
    is_fake,
    nested_rows,
    rows_like,
    tracing_state,
)

__all__ = ["WORTH_WORK"]

WORTH_WORK = 1 << 25
"""The multiplications of a layer, for each thread, from which its steps are taken one by one.

They cost some 30 us more around their kernels than one operator does, whatever the size, which is
to be less than 5 % of the whole where nothing is gained. Few keys, whose scores stay in a cache
anyway, gain little but in half types: there it takes :data:`SHORT_TAKES` times as much.
"""
SHORT, SHORT_TAKES = 128, 8

_attention, _encoder_layer = fused_attention(), fused_encoder_layer()
_functional = F.multi_head_attention_forward
_MULTI_HEAD = "nn.MultiheadAttention's fused path"
_ENCODER = "nn.TransformerEncoderLayer's fused path"


class _Projections(NamedTuple):
    """The weights around attention: (3 D, D), (3 D,), (D, D), (D,)."""

    heads: int
    qkv_weight: Tensor
    qkv_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor


class _Rows(NamedTuple):
    """The input as dense rows, (B, T, D) or packed (total, D), and what each may attend."""

    x: Tensor
    mask: Mask | None
    layout: str


def _multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    """What stands in for ``torch._native_multi_head_attention``."""

    def stock() -> Any:
        return _attention(  # type: ignore[misc]
            query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias,
            mask, need_weights, average_attn_weights, mask_type,
        )  # fmt: skip

    if not router.entered:  # a program kept it
        return stock()
    if not router.is_watched() and _is_small(query, qkv_weight, None):
        return stock()
    weights = _Projections(num_head, qkv_weight, qkv_bias, proj_weight, proj_bias)
    if query is not key or query is not value:
        found: _Rows | str = "keys other than the queries"
    elif need_weights:
        found = "need_weights=True, and polyattn gives no weights"
    else:
        found = _rows_of(query, weights, None, mask, mask_type)

    def run(rows: _Rows) -> Any:
        out = _attend(rows, weights)
        return rows_like(out, query) if query.is_nested else out, None

    return _decided(_MULTI_HEAD, found, query, mask, run, stock)


def _encoder(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Any:
    """What stands in for ``torch._transformer_encoder_layer_fwd``."""

    def stock() -> Any:
        return _encoder_layer(  # type: ignore[misc]
            src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu,
            norm_first, eps, norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2, ffn_weight_1,
            ffn_bias_1, ffn_weight_2, ffn_bias_2, mask, mask_type,
        )  # fmt: skip

    if not router.entered:  # a program kept it
        return stock()
    if not router.is_watched() and _is_small(src, qkv_weight, ffn_weight_1):
        return stock()
    weights = _Projections(num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias)

    def feed(x: Tensor) -> Tensor:
        x = F.linear(x, ffn_weight_1, ffn_bias_1)
        x = torch.ops.aten.gelu_(x) if use_gelu else x.relu_()
        return F.linear(x, ffn_weight_2, ffn_bias_2)

    def run(rows: _Rows) -> Any:
        x = rows.x
        first = norm_weight_1.shape, norm_weight_1, norm_bias_1, eps
        second = norm_weight_2.shape, norm_weight_2, norm_bias_2, eps
        if norm_first:
            x = _attend(rows._replace(x=F.layer_norm(x, *first)), weights).add_(x)
            x = feed(F.layer_norm(x, *second)).add_(x)
        else:
            x = F.layer_norm(_attend(rows, weights).add_(x), *first)
            x = F.layer_norm(feed(x).add_(x), *second)
        return rows_like(x, src) if src.is_nested else x

    found = _rows_of(src, weights, ffn_weight_1, mask, mask_type)
    return _decided(_ENCODER, found, src, mask, run, stock)


def _decided(
    name: str,
    found: _Rows | str,
    x: Tensor,
    mask: Tensor | None,
    run: Callable[[_Rows], Any],
    stock: Callable[[], Any],
) -> Any:
    """Run the steps one by one, or torch's operator; the listeners hear of it."""
    if isinstance(found, _Rows):
        rows = found
        return router.run(None, lambda: run(rows))
    if not is_fake(x):  # those only look
        call = None if isinstance(x, Tensor) and x.is_nested else SdpaCall(x, x, x, mask)
        router.hand_over(f"{name}: {found}", call, name.removesuffix("'s fused path"))
    return stock()


def _attend(rows: _Rows, weights: _Projections) -> Tensor:
    """Return what nn.MultiheadAttention makes of rows."""
    x, heads = rows.x, weights.heads
    qkv = F.linear(x, weights.qkv_weight, weights.qkv_bias)
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(-3)
    out = attention(q, k, v, mask=rows.mask, layout=rows.layout)
    return F.linear(out.flatten(-2), weights.out_weight, weights.out_bias)


def _rows_of(
    x: Tensor, weights: _Projections, ffn: Tensor | None, mask: Tensor | None, mask_type: int | None
) -> _Rows | str:
    """Return the rows of a layer's input and its mask, or why torch's operator is to run it."""
    arrays = (x, *weights[1:], *(() if mask is None else (mask,)))
    if (reason := _foreign(x, arrays)) is not None:
        return reason
    asked = router.is_asked()
    if x.device.type != "cpu" and not asked:
        return f"on {x.device.type}: it is measured on CPUs only"
    if not asked and _is_small(x, weights.qkv_weight, ffn):
        return "too small to gain"
    if x.is_nested:
        found = nested_rows(x)
        if mask is not None or found is None:
            return "a nested tensor with a mask, or that is no block of rows"
        rows, lengths = found
        offsets = F.pad(lengths.cumsum(0), (1, 0)).to(x.device, torch.int32)
        return _Rows(rows, Packed(offsets), "packed")
    seen = mask_of(mask, mask_type, (x.shape[0], weights.heads, x.shape[1]))
    return seen if isinstance(seen, str) else _Rows(x, seen, "BTNH")


def _foreign(x: Any, arrays: tuple[Any, ...]) -> str | None:
    """Say what of a call is nothing for the steps, whatever their gain."""
    own = sorted({type(one).__name__ for one in arrays if type(one) not in PLAIN})
    if own:
        return f"a tensor of type {', '.join(own)}"
    if tracing_state() is not None:
        return "torch.jit tracing it"
    if are_transforms_active():
        return "a function transform (torch.func) around it"
    if torch.is_autocast_enabled(x.device.type):
        return "under autocast, which its operator ignores"
    if torch.is_grad_enabled() and any(one.requires_grad for one in arrays):
        return "gradients, which its operator has not"
    if x.dim() != 3 or str(x.dtype).rpartition(".")[2] not in DTYPES:
        return f"an input of {x.dim()} dims and {x.dtype}"
    return None


def _is_small(x: Any, weight: Any, ffn: Any) -> bool:
    """Say whether a layer is so short that what is done between its steps is a share of them."""
    if not (isinstance(x, Tensor) and x.dim() == 3):
        return False
    width, entries = weight.shape[1], x.numel()
    # of nested tensors the lengths would have to be read; all rows as one is the most
    length = entries // max(width, 1) if x.is_nested else x.shape[1]
    hidden = 0 if ffn is None else ffn.shape[0]
    work: int = entries * (4 * width + 2 * hidden + 2 * length)
    most = WORTH_WORK * torch.get_num_threads()
    return work < (most if length >= SHORT else most * SHORT_TAKES)


def _forward(*args: Any, **kwargs: Any) -> Any:
    """What stands in for ``F.multi_head_attention_forward``: torch's own, of which it tells."""
    if not router.entered:  # a program kept it
        return _functional(*args, **kwargs)
    tensors = tuple(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    if has_torch_function(tensors):
        return handle_torch_function(_functional, tensors, *args, **kwargs)
    if kwargs.get("need_weights", args[_NEED_WEIGHTS] if len(args) > _NEED_WEIGHTS else True):
        reason = "nn.MultiheadAttention: need_weights=True, and polyattn gives no weights"
        call = SdpaCall(args[0], args[1], args[2], None) if len(args) > 2 else None
        router.hand_over(reason, call, "nn.MultiheadAttention")
    return _functional(*args, **kwargs)


_NEED_WEIGHTS = 15
"""Its place among the arguments, as the signature has had it since torch 1.9."""


router.add(
    Seam(fused_attention, _multi_head_attention, operator="aten::_native_multi_head_attention"),
    Seam(fused_encoder_layer, _encoder, operator="aten::_transformer_encoder_layer_fwd"),
    Seam(lambda: F.multi_head_attention_forward, _forward),
)
