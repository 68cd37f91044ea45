"""Which calls of torch's ``scaled_dot_product_attention`` polyattn models; the others stay torch's.

Not modelled is what is wrong, too: torch then says so in its own words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polyattn.problem import DTYPES
from polyattn.problem.admission.arrays import ArrayFacts

__all__ = ["SdpaFacts", "only_torch"]


class SdpaFacts(NamedTuple):
    """The arguments of torch's function in plain form: arrays as :class:`ArrayFacts`."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any
    dropout_p: Any
    is_causal: Any
    scale: Any
    enable_gqa: Any


def only_torch(call: SdpaFacts, exact: bool = True) -> str | None:
    """Say why a call is left to torch's own function, or None; the answer is a noun.

    Not `exact`: sizes only say which of them are equal, and are not named.

    >>> x = ArrayFacts((4, 8), "float32")
    >>> only_torch(SdpaFacts(x, x, x, None, 0.0, False, None, False))
    'inputs of 2, 2 and 2 dims'
    """
    q, k, v, mask = call[:4]
    for x in (q, k, v, *(() if mask is None else (mask,))):
        if x.form != "strided" or x.device_type not in ("cpu", "cuda"):
            return f"a {x.form} tensor on {x.device_type}"
    ranks = tuple(len(x.shape) for x in (q, k, v))
    if len(set(ranks)) > 1 or ranks[0] < 3:
        return f"inputs of {ranks[0]}, {ranks[1]} and {ranks[2]} dims"
    if len({x.dtype for x in (q, k, v)}) > 1 or len({x.device for x in (q, k, v)}) > 1:
        return "inputs of several dtypes or devices"
    if q.dtype not in DTYPES:
        return f"inputs of dtype {q.dtype}"
    if _do_not_fit(q.shape, k.shape, v.shape, call.enable_gqa):
        shapes = f"shapes {q.shape}, {k.shape}, {v.shape}" if exact else "shapes like these"
        return f"{shapes} with enable_gqa={call.enable_gqa}"
    numbers = [call.dropout_p, *([] if call.scale is None else [call.scale])]
    if any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in numbers):
        return "a dropout_p or scale that is no Python number"
    if call.scale is not None and not abs(call.scale) < float("inf"):
        return f"scale={call.scale!r}"
    if not 0.0 <= call.dropout_p <= 1.0:
        return f"dropout_p={call.dropout_p!r}"
    for name in ("is_causal", "enable_gqa"):
        if type(getattr(call, name)) is not bool:
            return f"{name}={getattr(call, name)!r}"
    return None if mask is None else _mask(q, k, mask, call.is_causal, exact)


def _do_not_fit(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], gqa: bool) -> bool:
    """Say whether the shapes are wrong, or broadcast in a way that only torch computes."""
    grouped = gqa and len(q) >= 3
    heads = k[-3] == v[-3] and (q[-3] % max(k[-3], 1) == 0 if grouped else q[-3] == k[-3])
    alike = q[:-3] == k[:-3] == v[:-3] and k[-2] == v[-2]
    sized = min(q[-1], v[-1], k[-3]) > 0
    return not (heads and alike and sized and q[-1] == k[-1])


def _mask(
    q: ArrayFacts, k: ArrayFacts, mask: ArrayFacts, is_causal: bool, exact: bool
) -> str | None:
    if is_causal:
        return "attn_mask beside is_causal"
    if mask.dtype not in ("bool", "float32", q.dtype) or mask.device != q.device:
        return f"an attn_mask of dtype {mask.dtype} on {mask.device}"
    rank = len(mask.shape)
    if len(q.shape) > 4 and rank > 3:
        return f"an attn_mask of {rank} dims beside inputs of {len(q.shape)}"
    full = (*q.shape[:-1], k.shape[-2])
    got = (1,) * (len(full) - rank) + mask.shape
    if rank not in range(2, len(full) + 1) or any(
        g not in (1, f) for g, f in zip(got, full, strict=True)
    ):
        shape = f"shape {mask.shape}" if exact else f"{rank} dims and this shape"
        return f"an attn_mask of {shape}"
    return None
