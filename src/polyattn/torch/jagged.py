"""Jagged nested tensors, torch's own of varying lengths: packed rows of sequences, and back.

A jagged tensor (B, j, N, H) is its values (total, N, H) and the offsets of its sequences: what
``layout="packed"`` and :class:`polyattn.Packed` say. So a call of three such is a packed call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from polyattn.masks import Mask, Packed
from polyattn.torch.call_model import JaggedRows
from polyattn.torch.internals import known_lengths, ragged_dim
from polyattn.torch.refusals import refuse

__all__ = ["PackedCall", "attention", "is_any_nested", "only_torch", "packed_call"]

_RAGGED = {"BTNH": 1, "BNTH": 2}


class PackedCall(NamedTuple):
    """A call of jagged tensors as one of packed rows: (total, N, H) each, and the packed mask."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask


def is_any_nested(*tensors: Any) -> bool:
    """Say whether one of them is a nested tensor, of whatever layout."""
    return any(isinstance(x, Tensor) and x.is_nested for x in tensors)


def attention(attend: Callable[..., Any], q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """Call `attend`, which takes packed rows, on jagged tensors; the output has q's offsets.

    `options`: all of :func:`polyattn.torch.attention`, in its order.
    """
    layout = options["layout"]
    call = packed_call(q, k, v, layout, options["mask"])
    options = {**options, "mask": call.mask, "layout": "packed"}
    found = attend(call.query, call.key, call.value, **options)
    if not options["return_lse"]:
        return _jagged(found, q, layout)
    out, lse = found
    # (N, total) and (B, N, j): the lse has its heads first in both layouts
    return _jagged(out, q, layout), _from_jagged(lse, q, 2)


def packed_call(q: Any, k: Any, v: Any, layout: Any, mask: Any) -> PackedCall:
    """Return the packed rows of three jagged tensors; raise InvalidProblem for a wrong mixture.

    >>> x = torch.nested.nested_tensor([torch.ones(2, 4, 8), torch.ones(3, 4, 8)],
    ...                                layout=torch.jagged)
    >>> call = packed_call(x, x, x, "BTNH", None)
    >>> call.query.shape, call.mask
    (torch.Size([5, 4, 8]), Packed(q=3, kv=3))
    """
    if layout not in ("BTNH", "BNTH"):
        refuse(
            f"got layout={layout!r} with nested tensors, expected 'BTNH' or 'BNTH': they say "
            "themselves how their sequences are packed."
        )
    for name, x in (("query", q), ("key", k), ("value", v)):
        _check_form(name, x, layout)
    _check_sequences(q, k, v)
    rows = (JaggedRows if is_dynamo_compiling() else Packed)(q.offsets(), k.offsets())
    if mask is None:
        joined: Mask = rows
    elif not isinstance(mask, Mask):
        joined = mask  # for admission to say
    elif "Packed" in mask.kinds:
        refuse(
            f"got mask={mask!r} with nested tensors, expected a mask without Packed: the offsets "
            "are those of the tensors."
        )
    else:
        joined = rows & mask
    return PackedCall(_rows(q, layout), _rows(k, layout), _rows(v, layout), joined)


def only_torch(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any
) -> str | None:
    """Say why a call with torch's signature and a nested tensor in it is left to torch, or None.

    On CPUs torch copies each sequence out and runs its unfused path, and has no causal one; on
    other devices it has kernels of varying lengths.
    """
    every: tuple[Any, ...] = (q, k, v) if attn_mask is None else (q, k, v, attn_mask)
    for x in every:
        if is_any_nested(x) and x.layout != torch.jagged:
            return f"a nested tensor of layout {x.layout}"
        if not is_any_nested(x):
            return f"a tensor of type {type(x).__name__} beside a nested one"
        if x.device.type != "cpu":
            return f"jagged tensors on {x.device.type}"
        if x.dim() != 4 or ragged_dim(x) != 2 or x.lengths() is not None:
            return "jagged tensors that are not (B, N, j, H) without gaps"
    if attn_mask is not None or dropout_p != 0.0:
        return "jagged tensors with an attn_mask or dropout"
    plain = scale is None or isinstance(scale, (int, float))
    if not plain or type(is_causal) is not bool or type(gqa) is not bool:
        return "jagged tensors with options of other types"
    heads = q.shape[1] == k.shape[1] or (gqa and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0)
    sized = (
        q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and min(q.shape[3], v.shape[3]) > 0
    )
    if not (heads and sized and k.shape[1] == v.shape[1] and _are_alike(k, v)):
        return "jagged tensors of these shapes"
    return None if q.dtype == k.dtype == v.dtype else "jagged tensors of several dtypes"


def _check_form(name: str, x: Any, layout: str) -> None:
    if not is_any_nested(x):
        kind = "dense " + name if isinstance(x, Tensor) else f"{name} of type {type(x).__name__}"
        refuse(
            f"got a {kind} beside a nested tensor, expected three of one kind: "
            "torch.nested.nested_tensor_from_jagged(values, offsets=...) makes packed rows nested, "
            "and .to_padded_tensor(0.0) a nested tensor dense."
        )
    if x.layout != torch.jagged:
        refuse(
            f"got a nested {name} of layout {x.layout}, expected torch.jagged: "
            "torch.nested.as_nested_tensor(x.unbind(), layout=torch.jagged) makes it so."
        )
    wanted = "(B, j, N, H)" if layout == "BTNH" else "(B, N, j, H)"
    if x.dim() != 4 or ragged_dim(x) != _RAGGED[layout]:
        refuse(
            f"got a nested {name} of {x.dim()} dims, of which dim {ragged_dim(x)} varies, expected "
            f"{wanted} for layout={layout!r}; transpose it, or pass the other layout."
        )
    if x.lengths() is not None:
        refuse(
            f"got a nested {name} with gaps between its sequences, as torch.nested.narrow makes "
            f"it, expected one without: pass {name}.contiguous()."
        )


def _check_sequences(q: Any, k: Any, v: Any) -> None:
    if q.shape[0] != k.shape[0]:
        refuse(
            f"got {q.shape[0]} sequences of queries and {k.shape[0]} of keys, expected as many of "
            "both."
        )
    if not _are_alike(k, v):
        refuse(
            "got a nested key and value whose sequences are of other lengths, expected the same: "
            "torch.nested.nested_tensor_from_jagged(values, offsets=key.offsets()) makes the value "
            "one with the key's."
        )


def _are_alike(k: Any, v: Any) -> bool:
    """Say whether two jagged tensors have the same offsets."""
    one, other = k.offsets(), v.offsets()
    if one is other:
        return True
    if is_dynamo_compiling():  # which knows offsets as symbols, and their lengths as one each
        return bool(k.shape[ragged_dim(k)] == v.shape[ragged_dim(v)])
    return one.shape == other.shape and bool(torch.equal(one, other))


def _rows(x: Any, layout: str) -> Tensor:
    """Return the values of a jagged tensor as (total, N, H)."""
    values: Tensor = x.values()
    return values if layout == "BTNH" else values.transpose(0, 1)


def _jagged(rows: Tensor, like: Any, layout: str) -> Tensor:
    """Return rows (total, N, V) as a jagged tensor with the offsets of another."""
    return _from_jagged(rows if layout == "BTNH" else rows.transpose(0, 1), like, _RAGGED[layout])


def _from_jagged(values: Tensor, like: Any, dim: int) -> Tensor:
    least, most = known_lengths(like)
    return torch.nested.nested_tensor_from_jagged(
        values, offsets=like.offsets(), jagged_dim=dim, min_seqlen=least, max_seqlen=most
    )
