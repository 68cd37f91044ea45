"""The four kernels behind torch's scaled_dot_product_attention, each called directly.

No global switch of torch is read or set: ``torch.ops.aten`` has every kernel by name. What the
operators lack is lowered here, exactly: masks and biases become additive tensors, key/value
groups are folded into query rows (never repeated), sinks become one more key whose score is the
sink, and rows that see no key are zeroed. Traps of the direct calls are kept from callers: the
CPU flash operator ends the process on empty sequences (the front-end answers those), returns
wrong values for a strided last dim (copied), and an lse of 0 for empty rows (rewritten); the math
operator adds boolean masks up as numbers (never handed any).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyattn.problem import Problem
from polyattn.simplify import key_range
from polyattn.torch import internals
from polyattn.torch.internals import are_transforms_active
from polyattn.torch.isolation import hide, holds_nan, is_readable, mend, zero_empty
from polyattn.torch.layouts import from_bnth, lse_from_bnt, to_bnth
from polyattn.torch.masking import Dims, Visible, dense_bias, four_dims, visible

__all__ = ["load_cudnn", "load_efficient", "load_flash", "load_math"]

Result = tuple[Tensor, Tensor | None]
Call = Callable[..., Result]
NATIVE_CAUSAL = "Causal('top_left')"


@dataclass(frozen=True)
class Op:
    """One operator: ``call(q, k, v, mask, causal, scale, dropout_p, lse)`` on (B, N, T, H).

    `grouped`: takes fewer key/value heads as they are. `zeroes_empty`: rows that see no key are
    0 with gradient 0 (its lse still has to be rewritten).
    `causal_with_mask`: applies its causal flag beside a mask. `wide`: takes float32 masks
    beside half-precision inputs, and masks that broadcast.
    """

    call: Call
    grouped: bool = False
    zeroes_empty: bool = False
    causal_with_mask: bool = False
    wide: bool = False


def _flash_cpu(function: Any) -> Call:
    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        causal: bool,
        scale: Any,
        dropout: float,
        lse: bool,
    ) -> Result:
        return function(q, k, v, dropout, causal, attn_mask=mask, scale=scale)  # type: ignore[no-any-return]

    return call


def _flash_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: Any, dropout: float, lse: bool
) -> Result:
    op = internals.flash_attention
    return op(q, k, v, dropout, causal, False, scale=scale)[:2]  # type: ignore[no-any-return]


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: Any, dropout: float, lse: bool
) -> Result:
    op = internals.efficient_attention
    if mask is not None:
        mask = _aligned(mask, (*q.shape[:3], k.shape[2]))
    out, sums, *_ = op(q, k, v, mask, lse or q.requires_grad, dropout, causal, scale=scale)
    return out, sums[..., : q.shape[2]] if lse else None


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: Any, dropout: float, lse: bool
) -> Result:
    op = internals.cudnn_attention
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
    out, sums, *_ = op(q, k, v, mask, True, dropout, causal, False, scale=scale)
    return out, sums.squeeze(-1) if sums.dim() == 4 else sums


def _math(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: Any, dropout: float, lse: bool
) -> Result:
    op = internals.math_attention
    wide = q.dtype in (torch.float16, torch.bfloat16)
    out_dtype = q.dtype
    if wide:  # softmax and accumulation in float32 at least
        q, k, v = q.float(), k.float(), v.float()
    out = op(q, k, v, mask, dropout, causal, None, scale=scale)[0]
    return (out.to(out_dtype) if wide else out), None


def _aligned(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Expand a mask; the memory-efficient kernel wants rows that begin at multiples of 16."""
    spare = -mask.shape[-1] % 16
    if spare:
        mask = torch.nn.functional.pad(mask, (0, spare))[..., : shape[-1]]
    return mask.expand(shape)


def load_flash() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Load the flash kernels: of the CPU, or FlashAttention 2 on CUDA."""

    def prepare(problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
        if problem.device == "cuda":
            return _prepare(Op(_flash_cuda, grouped=True), problem, config)
        # torch's own binding costs 1.7 us less than the operator handle; compilers want the handle
        function = (
            internals.flash_operator_for_cpu
            if problem.compiled
            else internals.flash_attention_for_cpu
        )
        if _is_plain(problem) and problem.mask is None:
            return _plain_flash_cpu(function, problem)
        op = Op(
            _flash_cpu(function), grouped=True, zeroes_empty=True, causal_with_mask=True, wide=True
        )
        kernel = _prepare(op, problem, config)
        if _is_plain(problem) and _is_square_causal(problem) and not problem.compiled:
            return _causal_flash_cpu(function, problem, kernel)
        if _is_plain(problem) and _is_dense(problem) and not problem.compiled:
            return _dense_flash_cpu(function, problem, kernel)
        return kernel

    return prepare


def load_efficient() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Load the memory-efficient kernel (CUTLASS), CUDA only."""
    return functools.partial(_prepare, Op(_efficient))


def load_cudnn() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Load cuDNN's fused attention, CUDA only."""
    return functools.partial(_prepare, Op(_cudnn, grouped=True))


def load_math() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Load the unfused path: matmul, softmax, matmul, on every device."""
    return functools.partial(_prepare, Op(_math, wide=True))


def _is_plain(p: Problem) -> bool:
    return (
        p.bias is None and not p.sinks and not p.lse and p.contiguous
        and not p.gqa and p.layout != "packed"
    )  # fmt: skip


def _is_square_causal(p: Problem) -> bool:
    causal = p.mask is not None and p.mask.signature == NATIVE_CAUSAL and p.q_len == p.kv_len
    return causal and _takes_flag(p)


def _takes_flag(p: Problem) -> bool:
    """Say whether the causal flag may be used: kernels scale its -inf, so 0 gives NaN, -1 +inf."""
    return p.scale is None or p.scale > 0


def _causal_flash_cpu(
    function: Any, problem: Problem, careful: Callable[..., Any]
) -> Callable[..., Any]:
    """The short way for causal calls; a NaN in the output sends the call the careful way."""
    turned, scale, grad = problem.layout == "BTNH", problem.scale, problem.grad
    small = problem.batch * problem.heads * problem.q_len * problem.head_dim <= 1 << 12

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        if turned:
            q4, k4, v4 = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            out = function(q4, k4, v4, 0.0, True, scale=scale)[0]
        else:
            out = function(q, k, v, 0.0, True, scale=scale)[0]
        if type(out) is Tensor and not are_transforms_active():
            # the last row sees every key: it tells whether there is a NaN among them
            last = out if small else out[:, :, -1]
            total = (last.detach() if grad else last).sum().item()
            if total != total:
                return careful(q, k, v, mask, bias, sinks)
        return out.transpose(1, 2) if turned else out

    return kernel


def _is_dense(p: Problem) -> bool:
    return p.mask is not None and p.mask.kinds == {"Dense"} and not p.grad


def _dense_flash_cpu(
    function: Any, problem: Problem, careful: Callable[..., Any]
) -> Callable[..., Any]:
    """The short way for one boolean mask in inference; a NaN sends the call the careful way."""
    turned, scale = problem.layout == "BTNH", problem.scale
    wide = torch.float64 if problem.dtype == "float64" else torch.float32

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        allowed = four_dims(mask.mask)
        q4, k4, v4 = (x.transpose(1, 2) for x in (q, k, v)) if turned else (q, k, v)
        if allowed.shape[-1] != k4.shape[2] or type(q) is not Tensor:
            return careful(q, k, v, mask, bias, sinks)
        added = torch.where(allowed, 0.0, float("-inf"))
        if added.dtype != wide:
            added = added.to(wide)
        out = function(q4, k4, v4, 0.0, False, attn_mask=added, scale=scale)[0]
        if are_transforms_active() or holds_nan(out, True):
            return careful(q, k, v, mask, bias, sinks)
        return out.transpose(1, 2) if turned else out

    return kernel


def _plain_flash_cpu(function: Any, problem: Problem) -> Callable[..., Any]:
    """The shortest way to the CPU kernel, for calls without mask: no more than torch's own."""
    scale = problem.scale
    if problem.layout == "BNTH":
        if scale is None:
            bare = lambda q, k, v, mask=None, bias=None, sinks=None: function(q, k, v)[0]  # noqa: E731
            bare.operator = function  # type: ignore[attr-defined]  # kernel(q, k, v) is operator(q, k, v)[0]
            return bare
        return lambda q, k, v, mask=None, bias=None, sinks=None: function(q, k, v, scale=scale)[0]

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if scale is None:  # torch's argument parser takes 0.1 us for a keyword
            return function(q, k, v)[0].transpose(1, 2)
        return function(q, k, v, scale=scale)[0].transpose(1, 2)

    return kernel


def _prepare(op: Op, problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
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
        out = from_bnth(out, layout)
        if not problem.lse:
            return out
        assert lse is not None  # declared by the capability
        return out, lse_from_bnt(lse, layout)

    return kernel


class _Attend:
    """One operator bound to one problem, on (B, N, T, H) arrays."""

    def __init__(self, op: Op, problem: Problem, config: Mapping[str, Any]) -> None:
        self.op, self.problem = op, problem
        kinds = problem.mask.signature if problem.mask else ""
        self.only_causal = kinds == NATIVE_CAUSAL or (
            kinds == "Causal()" and problem.device == "cuda" and op.call is _flash_cuda
        )
        self.causal_first = (
            op.causal_with_mask
            and problem.mask is not None
            and (
                problem.mask.signature.startswith(NATIVE_CAUSAL + " & ")
                and "Packed" not in problem.mask.kinds
            )
        )
        if problem.bias is not None or problem.sinks:
            self.only_causal = self.only_causal and op.causal_with_mask and not problem.sinks
            self.causal_first = self.causal_first and not problem.sinks
        if not _takes_flag(problem):
            self.only_causal = self.causal_first = False
        if problem.bias is not None and problem.lse:
            self.only_causal = False  # which rows are empty depends on both together
        few_rows = problem.q_len <= 32
        wants_fold = bool(config.get("fold", few_rows)) if op.grouped else True
        self.fold = problem.gqa and wants_fold and not self._flag
        if problem.gqa and not op.grouped and not self.fold:
            self.only_causal = self.causal_first = False
            self.fold = True
        self.scale = problem.scale
        if problem.scale is None and problem.sinks:
            self.scale = 1 / math.sqrt(problem.head_dim)

    @property
    def _flag(self) -> bool:
        return self.only_causal or self.causal_first

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, sinks: Any) -> Result:
        dims, p = Dims.of(q, k), self.problem
        high = dims.kv_len
        view: Visible | None = None
        if mask is not None and not self.only_causal:
            view = visible(mask, dims, q.device)
        elif mask is not None:
            _, high = key_range(mask, dims.q_len, dims.kv_len)
            k, v = k[:, :, :high], v[:, :, :high]
        readable = is_readable(q)
        if view is not None and (p.grad or p.bias_grad or p.sinks_grad or not readable):
            q, k, v = hide(q, k, v, view)
        additive, empty = self._additive(q, dims, view, bias, sinks, high)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Result:
            return self._run(q, k, v, additive, sinks is not None)

        if mask is not None and readable:
            out, lse = mend(run, q, k, v, lambda: visible(mask, Dims.of(q, k), q.device), True)
        else:
            out, lse = run(q, k, v)
        return (out, lse) if empty is None else zero_empty(out, lse, empty)

    def _additive(
        self, q: Tensor, dims: Dims, view: Visible | None, bias: Any, sinks: Any, high: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return what the operator takes as mask, (B|1, N|1, T|1, S), and the rows to zero."""
        zeroing = sinks is None and (self.problem.lse or not self.op.zeroes_empty)
        opening = sinks is None and not self.op.zeroes_empty
        empty = view.empty if view is not None and zeroing else None
        allowed = None
        if view is not None:
            # a row without keys attends everywhere and is zeroed afterwards: finite gradients
            allowed = view.mask | view.empty if opening else view.mask
        if bias is None and sinks is None and allowed is None:
            return None, None
        wide = torch.promote_types(q.dtype, torch.float32) if self.op.wide else q.dtype
        if bias is not None:
            added = dense_bias(bias, dims, wide)
        elif allowed is None:
            added = torch.zeros((1, 1, 1, 1), dtype=wide, device=q.device)
        else:
            added = torch.where(allowed, 0.0, float("-inf")).to(wide)
        if bias is not None and allowed is not None:
            added = torch.where(allowed, added, float("-inf"))
        if zeroing and bias is not None:  # -inf in the bias masks as well
            shut = (added == float("-inf")).all(-1, keepdim=True)
            added = torch.where(shut, 0, added) if opening else added
            empty = shut if empty is None else empty | shut
        if added.shape[-1] != high:
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
        if p.lse and p.grad and lse is not None and torch.is_grad_enabled():
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
        q_len = q.shape[2]
        if self.fold:
            q = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        out, lse = self.op.call(q, k, v, mask, self._flag, self.scale, p.dropout_p, p.lse)
        if self.fold:
            out = out.unflatten(2, (-1, q_len)).flatten(1, 2)
            lse = None if lse is None else lse.unflatten(2, (-1, q_len)).flatten(1, 2)
        return out, lse
