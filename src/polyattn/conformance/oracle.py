"""What is right, written a second time from the contract (SEMANTICS) and from nothing else.

Masks are painted row by row and block by block into boolean arrays; attention is a dense softmax
in the dtype that is asked for, float64 for the truth. Neither ``Mask.allows`` nor any lowering or
backend of the library is used, so that their mistakes show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyattn.conformance.byte_rounding import byte_rounding, multiplies_bytes
from polyattn.conformance.cases import Case
from polyattn.conformance.inputs import Inputs
from polyattn.conformance.tolerance import FEW
from polyattn.masks import And, BlockMap, Causal, Mask, Not, Or, Packed
from polyattn.masks.biases import Alibi

__all__ = ["Answer", "allowed", "naive"]

INF = float("inf")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Place:
    """One batch entry or sequence: its number, sizes, first tokens, and where the diagonal lies."""

    b: int
    n: int
    t: int
    s: int
    first_q: int
    first_k: int
    top_left: bool

    @property
    def offset(self) -> int:
        """The key that query 0 stands at."""
        return 0 if self.top_left else self.s - self.t


def allowed(case: Case, mask: Mask | None) -> Tensor:
    """Paint a mask: (B, N, T, S) bool, one batch entry when packed; True = attend."""
    b, n, t, s = (1 if case.packed else case.b), case.n, case.t, case.s
    picture = np.zeros((b, n, t, s), dtype=bool)
    if mask is None:
        return torch.from_numpy(~picture)
    top_left = any(isinstance(leaf, Causal) and leaf.align == "top_left" for leaf in mask.leaves())
    if not case.packed:
        for i in range(b):
            picture[i] = _paint(mask, Place(i, n, t, s, 0, 0, top_left))
        return torch.from_numpy(picture)
    packed = next(leaf for leaf in mask.leaves() if isinstance(leaf, Packed))
    cu_q, cu_k = _numbers(packed.cu_q), _numbers(packed.cu_kv)
    for i in range(len(cu_q) - 1):
        (q0, q1), (k0, k1) = cu_q[i : i + 2], cu_k[i : i + 2]
        part = _paint(mask, Place(i, n, int(q1 - q0), int(k1 - k0), int(q0), int(k0), top_left))
        picture[0, :, q0:q1, k0:k1] = part
    return torch.from_numpy(picture)


def _numbers(payload: Any) -> Array:
    return payload.cpu().numpy() if isinstance(payload, Tensor) else np.array(payload, dtype=int)


def _paint(mask: Mask, at: Place) -> Array:
    """Return (N, T, S) bool of one place."""
    if isinstance(mask, Not):
        return ~_paint(mask.member, at)
    if isinstance(mask, (And, Or)):
        picture = _paint(mask.parts[0], at)
        for part in mask.parts[1:]:
            other = _paint(part, at)
            picture = (picture & other) if isinstance(mask, And) else (picture | other)
        return picture
    picture, name = np.zeros((at.n, at.t, at.s), dtype=bool), type(mask).__name__
    if name not in _LEAVES:
        raise NotImplementedError(
            f"got a {name}, which the oracle cannot paint; paint it in {__name__}, from its "
            "definition and not from its class."
        )
    _LEAVES[name](mask, at, picture)
    return picture


def _full(mask: Any, at: Place, picture: Array) -> None:
    picture[:] = True


def _causal(mask: Any, at: Place, picture: Array) -> None:
    for t in range(at.t):
        picture[:, t, : max(0, t + at.offset + 1)] = True


def _window(mask: Any, at: Place, picture: Array) -> None:
    for t in range(at.t):
        own = t + at.offset
        first = 0 if mask.left is None else max(0, own - mask.left)
        last = at.s - 1 if mask.right is None else own + mask.right
        picture[:, t, first : max(0, last + 1)] = True


def _padding(mask: Any, at: Place, picture: Array) -> None:
    rows = at.t if mask.q_lengths is None else int(_numbers(mask.q_lengths)[at.b])
    columns = at.s if mask.kv_lengths is None else int(_numbers(mask.kv_lengths)[at.b])
    picture[:, :rows, :columns] = True


def _left_padding(mask: Any, at: Place, picture: Array) -> None:
    row = 0 if mask.q_starts is None else int(_numbers(mask.q_starts)[at.b])
    column = 0 if mask.kv_starts is None else int(_numbers(mask.kv_starts)[at.b])
    picture[:, row:, column:] = True


def _chunks(mask: Any, at: Place, picture: Array) -> None:
    begin = 0
    while begin < at.s:  # chunk by chunk: the queries that stand in it see all of its keys
        rows = [t for t in range(at.t) if begin <= t + at.offset < begin + mask.size]
        picture[:, rows, begin : begin + mask.size] = True
        begin += mask.size


def _dilated(mask: Any, at: Place, picture: Array) -> None:
    for t in range(at.t):
        seen = t + at.offset
        while seen >= mask.step:
            seen -= mask.step
        while seen < at.s:
            if seen >= 0:
                picture[:, t, seen] = True
            seen += mask.step


def _first_keys(mask: Any, at: Place, picture: Array) -> None:
    picture[:, :, : mask.count] = True


def _segments(mask: Any, at: Place, picture: Array) -> None:
    q_ids, k_ids = _numbers(mask.q_ids), _numbers(mask.kv_ids)
    q_row = q_ids if q_ids.ndim == 1 else q_ids[at.b if len(q_ids) > 1 else 0]
    k_row = k_ids if k_ids.ndim == 1 else k_ids[at.b if len(k_ids) > 1 else 0]
    k_row = k_row[at.first_k : at.first_k + at.s]
    for t in range(at.t):
        picture[:, t, :] = k_row == q_row[at.first_q + t]


def _prefix(mask: Any, at: Place, picture: Array) -> None:
    _causal(mask, at, picture)
    picture[:, :, : int(_numbers(mask.lengths)[at.b])] = True


def _blocks(mask: BlockMap, at: Place, picture: Array) -> None:
    indices, counts = _numbers(mask.indices), _numbers(mask.counts)
    b = at.b if len(counts) > 1 else 0
    for n in range(at.n):
        head = n if counts.shape[1] > 1 else 0
        for row in range(counts.shape[2]):
            rows = slice(row * mask.block_q, (row + 1) * mask.block_q)
            for m in range(counts[b, head, row]):
                first = int(indices[b, head, row, m]) * mask.block_k
                picture[n, rows, first : first + mask.block_k] = True


def _dense(mask: Any, at: Place, picture: Array) -> None:
    array = _numbers(mask.mask)
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    picture[:] = array[at.b if len(array) > 1 else 0]


_LEAVES: dict[str, Any] = {
    "Full": _full, "Packed": _full, "Causal": _causal, "Window": _window, "Padding": _padding,
    "LeftPadding": _left_padding, "Chunked": _chunks, "Dilated": _dilated,
    "FirstKeys": _first_keys, "Segments": _segments, "PrefixLM": _prefix, "BlockMap": _blocks,
    "Dense": _dense,
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """The values of one call, in the call's shapes, by name: out, lse, and the gradients.

    `scale`, of the truth only, has the sum of the absolute values of the terms that make up each
    value: rounding is in proportion to it. `score` is the largest such sum behind a score. `beyond`
    is what values may be off beside that, where there is such a thing: what underflows, and what
    products of bytes round (see `byte_rounding`).
    """

    values: dict[str, Tensor]
    scale: dict[str, Tensor]
    score: float
    beyond: dict[str, Tensor]


def naive(inputs: Inputs, seen: Tensor, dtype: torch.dtype = torch.float64) -> Answer:
    """Compute outputs, lse and gradients in `dtype` on the CPU, from their definition."""
    case = inputs.case
    leaves = {name: x.detach().cpu().to(dtype) for name, x in _tensors(inputs).items()}
    wanted = [name for name in leaves if name in inputs.leaves]
    for name in wanted:
        leaves[name] = leaves[name].clone().requires_grad_()
    q, k, v = (_heads_second(leaves[name], case) for name in ("query", "key", "value"))
    groups = case.n // case.k
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    weights, lse, scores = _softmax(case, inputs, leaves, q, k, seen)
    out = weights[..., : case.s] @ v
    values = {"out": _as_called(out, case), "lse": lse[0] if case.packed else lse}
    if wanted:
        values |= _gradients(inputs, values, {name: leaves[name] for name in wanted})
    values = {name: x.detach() for name, x in values.items() if name != "lse" or case.lse}
    with torch.no_grad():
        score = float(scores.max()) if scores.numel() else 0.0
        weights = weights.detach()
        row = _row_sums(inputs, weights, lse.detach(), v)
        scales = _scales(inputs, leaves, weights, row, q, k, v)
        scales["lse"] = torch.ones_like(lse[0] if case.packed else lse)
        beyond = _beyond(inputs, weights[..., : case.s], q, k, v, seen)
        lost = _underflowing(weights, inputs.q.dtype)
        if bool(lost.any()):
            for name, x in _scales(inputs, leaves, lost, row, q, k, v).items():
                beyond[name] = beyond.get(name, 0) + x
        return Answer(values, scales, score, beyond)


def _underflowing(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return those probabilities that may be 0 in the accumulation type, and 0 for all others."""
    wide = torch.finfo(torch.promote_types(dtype, torch.float32))
    return torch.where(weights < FEW * wide.tiny, weights, 0)


def _beyond(
    inputs: Inputs, p: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor
) -> dict[str, Tensor]:
    case = inputs.case
    if inputs.quantised is None or not multiplies_bytes(case):
        return {}
    _, scales, block_size = inputs.quantised
    each = scales.cpu().repeat_interleave(block_size, -1)[..., : case.s].to(q.dtype)
    each = each.repeat_interleave(case.n // case.k, 1)
    scale = case.scale if case.scale is not None else 1.0 / math.sqrt(case.h)
    out, lse = byte_rounding(scale, q, k, v, each, p, seen)
    return {"out": _as_called(out, case), "lse": lse}


def _gradients(
    inputs: Inputs, values: dict[str, Tensor], slots: dict[str, Tensor]
) -> dict[str, Tensor]:
    incoming = {"out": inputs.grad_out}
    if inputs.case.lse:
        incoming["lse"] = inputs.grad_lse
    pairs = [(values[name], g.cpu().to(values[name])) for name, g in incoming.items()]
    pairs = [(x, g) for x, g in pairs if x.requires_grad]
    grads: Any = [None] * len(slots)
    if pairs:
        heads, tails = zip(*pairs, strict=True)
        grads = torch.autograd.grad(heads, list(slots.values()), tails, allow_unused=True)
    return {
        name: torch.zeros_like(slot) if grad is None else grad
        for (name, slot), grad in zip(slots.items(), grads, strict=True)
    }


def _tensors(inputs: Inputs) -> dict[str, Tensor]:
    every = {"query": inputs.q, "key": inputs.k, "value": inputs.v, "sinks": inputs.sinks}
    every["bias"] = None if inputs.bias is None else inputs.bias.payload
    if inputs.quantised is not None:
        keys, values, block_size = inputs.quantised
        every["key"] = _decoded(inputs.k, keys, block_size, inputs.case)
        every["value"] = _decoded(inputs.v, values, block_size, inputs.case)
    return {name: x for name, x in every.items() if x is not None}


def _decoded(codes: Tensor, scales: Tensor, block_size: int, case: Case) -> Tensor:
    """Return what codes stand for, block by block, in float64."""
    found = codes.double()
    rows = found if case.layout == "BNTH" else found.transpose(1, 2)
    for block in range(scales.shape[2]):
        part = slice(block * block_size, (block + 1) * block_size)
        rows[:, :, part] *= scales[:, :, block, None, None].double()
    return found


def _heads_second(x: Tensor, case: Case) -> Tensor:
    if case.packed:
        return x[None].permute(0, 2, 1, 3)
    return x if case.layout == "BNTH" else x.permute(0, 2, 1, 3)


def _as_called(x: Tensor, case: Case) -> Tensor:
    if case.packed:
        return x.permute(0, 2, 1, 3)[0]
    return x if case.layout == "BNTH" else x.permute(0, 2, 1, 3)


def _softmax(
    case: Case, inputs: Inputs, leaves: dict[str, Tensor], q: Tensor, k: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights over keys then sinks (at least one column), lse, and score magnitudes."""
    scale = case.scale if case.scale is not None else 1.0 / math.sqrt(case.h)
    s = (q @ k.mT) * scale
    size = (q.detach().abs() @ k.detach().abs().mT) * abs(scale)
    if case.softcap is not None:
        s = torch.tanh(s / case.softcap) * case.softcap
    if inputs.bias is not None:
        added = _added(inputs, leaves["bias"], case)
        visible = added > -INF
        seen = seen & visible
        added = torch.where(visible, added, 0)
        s, size = s + added, size + added.detach().abs()
    s = torch.where(seen, s, -INF)
    rows = s.shape[:3]
    last = s.new_full((case.n, 1), -INF)  # so that no row is without columns
    if "sinks" in leaves:
        last = torch.cat([leaves["sinks"].reshape(case.n, -1), last], -1)
    s = torch.cat([s, last[None, :, None].expand(*rows, -1)], -1)
    top = s.detach().amax(-1, keepdim=True)
    top = torch.where(top > -INF, top, 0)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    none = total == 0
    total = torch.where(none, 1, total)
    lse = torch.where(none, -INF, torch.log(total) + top)[..., 0]
    return e / total, lse, torch.where(seen, size, 0)


def _added(inputs: Inputs, array: Tensor, case: Case) -> Tensor:
    if not isinstance(inputs.bias, Alibi):
        return array.expand(case.b, case.n, case.t, case.s)
    away = [[abs(t + case.s - case.t - j) for j in range(case.s)] for t in range(case.t)]
    distance = torch.tensor(away, dtype=array.dtype).reshape(case.t, case.s)
    slopes = array.expand(case.b, case.n)
    return -slopes[:, :, None, None] * distance


def _row_sums(inputs: Inputs, w: Tensor, lse: Tensor, v: Tensor) -> Tensor:
    """Return (B, N, T, 1): what the backward pass takes from each row, as a sum of magnitudes."""
    case = inputs.case
    if not inputs.leaves:
        return torch.zeros_like(lse)[..., None]
    dp = _heads_second(inputs.grad_out.cpu().to(v.dtype), case).abs() @ v.abs().mT
    row = (w[..., : case.s] * dp).sum(-1, keepdim=True)
    if case.lse:
        row = row + inputs.grad_lse.cpu().to(v.dtype).abs().reshape(lse.shape)[..., None]
    return row


def _scales(
    inputs: Inputs,
    leaves: dict[str, Tensor],
    w: Tensor,
    row: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> dict[str, Tensor]:
    """Replace each sum of the formulas by the sum of its terms' absolute values.

    `w` are the probabilities, or those of them whose share in the values is asked for.
    """
    case = inputs.case
    q, k, v = q.abs(), k.abs(), v.abs()
    p = w[..., : case.s]
    scales = {"out": _as_called(p @ v, case)}
    if not inputs.leaves:
        return scales
    g = _heads_second(inputs.grad_out.cpu().to(q.dtype), case).abs()
    ds = p * (g @ v.mT + row)
    scale = abs(case.scale) if case.scale is not None else 1.0 / math.sqrt(case.h)
    shared = (q.shape[0], case.k, case.n // case.k)

    def grouped(x: Tensor) -> Tensor:
        return _as_called(x.reshape(*shared, *x.shape[2:]).sum(2), case)

    scales["query"] = _as_called(ds @ k, case) * scale
    scales["key"] = grouped(ds.mT @ q) * scale
    scales["value"] = grouped(p.mT @ g)
    if "bias" in leaves:
        probe = leaves["bias"].detach().clone().requires_grad_()
        with torch.enable_grad():
            added = _added(inputs, probe, case)
            scales["bias"] = torch.autograd.grad(added, probe, ds)[0].abs()
    if "sinks" in leaves:
        last = (w[..., case.s : -1] * row).sum((0, 2))
        scales["sinks"] = last.reshape(leaves["sinks"].shape)
    return scales
