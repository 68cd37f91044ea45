"""From a problem to an operator: masks, biases, groups, sinks and empty rows, lowered exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyattn.backends.sdpa.torch.cuda_memory import in_vectors, in_vectors_traced
from polyattn.backends.sdpa.torch.operators import FEW_KEYS, Op, Result, flash_cuda
from polyattn.backends.sdpa.torch.short_ways import takes_flag
from polyattn.masks.simplify import key_range
from polyattn.masks.structure import Structure
from polyattn.problem import MaskFacts, Problem
from polyattn.torch.internals import are_sizes_marked, is_known
from polyattn.torch.kit.layouts import from_bnth, lse_from_bnt, to_bnth
from polyattn.torch.kit.masking import Dims, Visible, dense_bias, visible
from polyattn.torch.kit.nan_isolation import hide, is_readable, mend, zero_empty

__all__ = ["prepare"]


def _may_be_few(keys: int, compiled: bool) -> bool:
    """Say whether there are few keys; a size that was marked as dynamic is not compared."""
    if compiled and are_sizes_marked():
        return not is_known(keys >= FEW_KEYS)
    return keys < FEW_KEYS


def prepare(op: Op, problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a kernel for the problem: layout, lowering, the operator, isolation, layout."""
    layout = problem.layout
    attend = _Attend(op, problem, config)

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        q, k, v = (to_bnth(x, layout) for x in (q, k, v))
        if not problem.contiguous:
            q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out, lse = attend(q, k, v, mask, bias, sinks)
        if layout == "BNTH" and not problem.contiguous:
            out = out.contiguous()  # as torch's own, which runs its unfused path for these
        out = from_bnth(out, layout)
        if not problem.lse:
            return out
        assert lse is not None  # declared by the capability
        return out, lse_from_bnt(lse, layout)

    return kernel


def _begins_causal(mask: MaskFacts) -> bool:
    """Say whether a causal mask, aligned as torch's flag is, is joined to others by ``&``."""
    found = mask.structure
    causal = Structure("Causal", ("top_left",))
    return found.kind == "And" and found.parts[0] == causal and "Packed" not in mask.kinds


class _Attend:
    """One operator bound to one problem, on (B, N, T, H) arrays."""

    def __init__(self, op: Op, problem: Problem, config: Mapping[str, Any]) -> None:
        self.op, self.problem = op, problem
        mask = problem.mask
        self.only_causal = mask is not None and (
            mask.is_causal("top_left")
            or (mask.is_causal() and problem.device == "cuda" and op.call is flash_cuda)
        )
        self.causal_first = op.causal_with_mask and mask is not None and _begins_causal(mask)
        if problem.bias is not None or problem.sinks:
            self.only_causal = self.only_causal and op.causal_with_mask and not problem.sinks
            self.causal_first = self.causal_first and not problem.sinks
        if not takes_flag(problem):
            self.only_causal = self.causal_first = False
        if problem.bias is not None and problem.lse:
            self.only_causal = False  # which rows are empty depends on both together
        few_rows = problem.q_len <= 32 and op.folds
        wants_fold = bool(config.get("fold", few_rows)) if op.grouped else True
        self.fold = problem.gqa and wants_fold and not self._flag
        self.fold = self.fold and not op.any_sizes  # whether there are few rows is not known
        if problem.gqa and not op.grouped and not self.fold:
            self.only_causal = self.causal_first = False
            self.fold = True
        self.laid = in_vectors_traced() if op.in_vectors and problem.compiled else in_vectors
        self.scale = problem.scale
        if problem.scale is None and problem.sinks:
            self.scale = 1 / math.sqrt(problem.head_dim)

    @property
    def _flag(self) -> bool:
        return self.only_causal or self.causal_first

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, sinks: Any) -> Result:
        dims, p = Dims.of(q, k), self.problem
        if self.op.ranges:
            return self._in_ranges(q, k, v, mask, dims)
        high = dims.kv_len
        view: Visible | None = None
        if self.op.windows:
            first, _ = key_range(mask, dims.q_len, dims.kv_len)
            k, v = k[:, :, first:], v[:, :, first:]
        elif mask is not None and not self.only_causal:
            view = visible(mask, dims, q.device)
        elif mask is not None:
            if self.op.any_sizes:
                last = dims.q_len  # all that a diagonal from the first query to the last shows
            else:
                _, last = key_range(mask, dims.q_len, dims.kv_len)
            if p.dropout_p > 0 or self.op.any_sizes:  # torch draws for every key: the same here
                seen = torch.arange(high, device=q.device).unsqueeze(-1) < last
                k, v = torch.where(seen, k, 0), torch.where(seen, v, 0)
            else:
                high = last
                k, v = k[:, :, :high], v[:, :, :high]
        readable = is_readable(q)
        trains = p.grad or p.bias_grad or p.sinks_grad
        if view is not None and (trains or not readable) and not view.is_whole:
            # in eager inference it is enough that such rows are zeroed afterwards, if they are
            rows = trains or p.compiled or self.op.zeroes_empty or sinks is not None
            q, k, v = hide(q, k, v, view, rows)
        additive, empty = self._additive(q, dims, view, bias, sinks, high)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Result:
            return self._run(q, k, v, additive, sinks is not None)

        if mask is not None and readable and not self.op.windows:
            scale = p.scale if p.scale is not None else 1 / math.sqrt(p.head_dim)
            out, lse = mend(
                run, q, k, v, lambda: visible(mask, Dims.of(q, k), q.device), True, scale
            )
        else:
            out, lse = run(q, k, v)
        return (out, lse) if empty is None else zero_empty(out, lse, empty)

    def _in_ranges(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dims: Dims) -> Result:
        if self.problem.lse and self.problem.grad:  # a NaN in rows without keys: in no gradient
            q = q.masked_fill(visible(mask, dims, q.device).empty, 0)
        return self._run(q, k, v, mask, False)

    def _additive(
        self, q: Tensor, dims: Dims, view: Visible | None, bias: Any, sinks: Any, high: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return what the operator takes as mask, (B|1, N|1, T|1, S), and the rows to zero."""
        zeroing = sinks is None and (self.problem.lse or not self.op.zeroes_empty)
        if view is not None and view.is_whole and bias is None:
            zeroing = False
        opening = zeroing and not self.op.zeroes_empty
        empty = view.empty if view is not None and zeroing else None
        allowed = None
        if view is not None:
            # a row without keys attends everywhere and is zeroed afterwards: finite gradients
            allowed = view.mask | view.empty if opening else view.mask
        few = self.op.loses_nan and _may_be_few(high, self.problem.compiled)
        if bias is None and sinks is None and allowed is None and not few:
            return None, None
        wide = torch.promote_types(q.dtype, torch.float32) if self.op.wide else q.dtype
        if bias is not None:
            added = dense_bias(bias, dims, wide)
        elif allowed is None:
            added = torch.zeros((1, 1, 1, 1), dtype=wide, device=q.device)
        else:
            nothing = torch.zeros((1, 1, 1, 1), dtype=wide, device=q.device)
            added = nothing.masked_fill(~allowed, float("-inf"))
        if bias is not None and allowed is not None:
            added = added.masked_fill(~allowed, float("-inf"))
        if zeroing and bias is not None:  # -inf in the bias masks as well
            shut = (added == float("-inf")).all(-1, keepdim=True)
            added = torch.where(shut, 0, added) if opening else added
            empty = shut if empty is None else empty | shut
        if self.op.any_sizes or added.shape[-1] != high:
            added = added.expand(-1, -1, -1, dims.kv_len)[..., :high]
        if sinks is not None:
            column = sinks.to(wide).reshape(1, dims.heads, -1).logsumexp(-1)[..., None, None]
            added = added.expand(-1, dims.heads, -1, -1)
            added = torch.cat([added, column.expand(*added.shape[:3], 1)], -1)
        return self._folded(added, dims), empty

    def _folded(self, mask: Tensor | None, dims: Dims) -> Tensor | None:
        if mask is None or not self.fold or (mask.shape[1] == 1 and mask.shape[2] == 1):
            return mask
        mask = mask.expand(-1, dims.heads, dims.q_len, -1)
        return mask.unflatten(1, (dims.kv_heads, -1)).flatten(2, 3)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sink: bool) -> Result:
        p = self.problem
        out, lse = self._grouped(q, k, v, mask, sink)
        surrogate_needed = p.lse and p.grad and not self.op.lse_trains
        if surrogate_needed and lse is not None and torch.is_grad_enabled():
            # the operators' lse has no gradient; d lse = scale * sum_j p_j (dq . k_j + q . dk_j),
            # which the same kernel gives with the keys in place of the values
            keys, _ = self._grouped(q.detach(), k.detach(), k, mask, sink)
            scale = self.scale if self.scale is not None else 1 / math.sqrt(p.head_dim)
            surrogate = scale * (q * keys).sum(-1).to(lse.dtype)
            lse = lse.detach() + (surrogate - surrogate.detach())
        return out, lse if p.lse else None

    def _grouped(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sink: bool) -> Result:
        p = self.problem
        if sink:
            k, v = (torch.cat([x, x.new_zeros((*x.shape[:2], 1, x.shape[3]))], 2) for x in (k, v))
        q_len, given = q.shape[2], q
        if self.fold:
            q = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        if self.op.in_vectors:
            q, k, v = self.laid(q), self.laid(k), self.laid(v)
        out, lse = self.op.call(q, k, v, mask, self._flag, self.scale, p.dropout_p, p.lse)
        if self.fold:
            out = out.unflatten(2, (-1, q_len)).flatten(1, 2)
            if p.layout == "BNTH" and self.op.like_query and not given.is_contiguous():
                out = torch.empty_like(given).copy_(out)
            lse = None if lse is None else lse.unflatten(2, (-1, q_len)).flatten(1, 2)
        return out, lse
