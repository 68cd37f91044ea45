"""What FlexAttention is told: constants, a call's arrays, and the functions made of both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.masks import Index, Mask, Packed
from polyattn.masks.biases import Alibi
from polyattn.problem import Problem
from polyattn.torch.kit.masking import Dims

__all__ = ["Spec", "Tables", "Terms", "allowed", "bias_rows", "mods", "sink_rows", "token_tables"]


@dataclass(frozen=True)
class Spec:
    """The constants of a class of problems."""

    scale: float
    alibi: bool
    gqa: bool
    lse: bool

    @classmethod
    def of(cls, p: Problem) -> Spec:
        scale = p.scale if p.scale is not None else 1 / math.sqrt(p.head_dim)
        alibi = p.bias_structure is not None and p.bias_structure.kind == "Alibi"
        return cls(scale, alibi, p.gqa, p.lse)


class Tables(NamedTuple):
    """For each token of a packed row: its sequence, its place in it, the sequence's lengths."""

    seq_q: Tensor
    seq_k: Tensor
    t: Tensor
    j: Tensor
    q_len: Tensor
    kv_len: Tensor


class Terms(NamedTuple):
    """What a call brings beside q, k, v. `bias` (or slopes) and `sinks` broadcast to (B, N, T, S).

    Numbers are arrays too: compilers would make symbols of lengths, which torch 2.13 gets wrong.
    """

    mask: Mask | None
    tables: Tables | None
    bias: Tensor | None
    sinks: Tensor | None
    softcap: Tensor | None
    q_len: Tensor
    kv_len: Tensor


def token_tables(mask: Mask, dims: Dims) -> Tables:
    """Say for each token of a packed row where it stands."""
    packed = next(leaf for leaf in mask.leaves() if isinstance(leaf, Packed))
    cu_q, cu_kv = packed.cu_q.long(), packed.cu_kv.long()
    t = torch.arange(dims.q_len, device=cu_q.device)
    j = torch.arange(dims.kv_len, device=cu_q.device)
    seq_q = torch.searchsorted(cu_q, t, right=True) - 1
    seq_k = torch.searchsorted(cu_kv, j, right=True) - 1
    lengths = cu_q.diff()[seq_q], cu_kv.diff()[seq_q]
    return Tables(seq_q, seq_k, t - cu_q[seq_q], j - cu_kv[seq_k], *lengths)


def bias_rows(bias: Any) -> Tensor:
    """Return a bias, or the slopes of Alibi, with four dims."""
    array: Tensor = bias.payload
    if isinstance(bias, Alibi):
        return array.reshape(-1 if array.dim() == 2 else 1, array.shape[-1], 1, 1)
    return array.reshape((1,) * (4 - array.dim()) + tuple(array.shape))


def sink_rows(sinks: Tensor, wide: torch.dtype) -> Tensor:
    """Join the sinks of each head to one, (1, N, 1, 1) in `wide` at least."""
    sinks = sinks.to(torch.promote_types(sinks.dtype, wide))
    return sinks.reshape(1, sinks.shape[0], 1, -1).logsumexp(-1, keepdim=True)


def allowed(terms: Terms, b: Any, n: Any, t: Any, j: Any, q_len: Any, kv_len: Any) -> Any:
    """Ask the mask, at scalars (by FlexAttention) or at arrays that broadcast."""
    mask, x = terms.mask, terms.tables
    assert mask is not None
    align = mask.align or "bottom_right"
    if x is None:
        return mask.allows(Index(b, n, t, j, q_len, kv_len, align))
    seq, same = x.seq_q[t], x.seq_q[t] == x.seq_k[j]
    return mask.allows(Index(seq, n, x.t[t], x.j[j], x.q_len[t], x.kv_len[t], align, same, t, j))


def mods(spec: Spec, terms: Terms, place: Any, trains: bool = False) -> tuple[Any, Any]:
    """Return FlexAttention's two functions, each None if there is nothing to do.

    `place`: from the head and row that FlexAttention counts to the query's head and position.
    """
    bias, sinks, softcap = terms.bias, terms.sinks, terms.softcap
    q_len, kv_len = terms.q_len, terms.kv_len
    # a bias of -inf masks; gradients stop at masks only, and of a row of -inf alone are NaN
    closes = trains and bias is not None and not spec.alibi

    def score_mod(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        j = n if sinks is None else torch.where(n < kv_len, n, 0)
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            added = _entry(bias, b, h, m, j).to(score.dtype)
            if spec.alibi:
                added = -added * (place(h, m)[1] + (kv_len - q_len) - j).abs().to(score.dtype)
            score = score + added
        if sinks is not None:
            score = torch.where(n < kv_len, score, _entry(sinks, b, h, m, n).to(score.dtype))
        return score

    def mask_mod(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        head, t = place(h, m)
        j = n if sinks is None else torch.where(n < kv_len, n, 0)
        seen = n >= 0 if terms.mask is None else allowed(terms, b, head, t, j, q_len, kv_len)
        if closes:
            assert bias is not None
            seen = seen & (_entry(bias, b, h, m, j) != float("-inf"))
        return seen if sinks is None else seen | (n >= kv_len)

    changed = softcap is not None or bias is not None or sinks is not None
    return score_mod if changed else None, mask_mod if closes or terms.mask is not None else None


def _entry(array: Tensor, *where: Tensor) -> Tensor:
    """Look up an array whose dims of size 1 broadcast; no two lookups meet, so gradients of
    lookups are sums in one fixed order.
    """
    kept = [d for d in range(4) if array.shape[d] != 1]
    array = array.squeeze([d for d in range(4) if d not in kept])
    return array[tuple(where[d] for d in kept)] if kept else array
