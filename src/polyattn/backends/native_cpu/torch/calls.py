"""The extension's two functions on tensors of the CPU: what eager code and operators run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.backends.native_cpu.torch.arguments import (
    DTYPES,
    Sizes,
    array,
    bias_argument,
    rows,
    sinks_argument,
    sizes_of,
    slopes_argument,
    terms_of,
)
from polyattn.errors import InvalidProblem
from polyattn.native import module
from polyattn.native.forms import isa_for
from polyattn.torch.internals import is_zero_tensor

__all__ = [
    "Constants", "Extras", "Needs", "as_it_counts", "backward", "dense_rows", "empty_like_rows",
    "empty_lse", "empty_out", "forward",
]  # fmt: skip


class Constants(NamedTuple):
    """What a problem fixes. `softcap`: 0 for none."""

    layout: str
    scale: float
    softcap: float


class Extras(NamedTuple):
    """What a call may bring beside q, k, v: a dense bias or slopes, sinks, and its mask.

    `codes`, `arrays`: see `polyattn.native.program`.
    """

    bias: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None
    codes: Sequence[int]
    arrays: Sequence[Tensor]


class Needs(NamedTuple):
    """Which gradients of a backward pass are wanted beside those of q, k, v."""

    bias: bool
    sinks: bool


Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def empty_like_rows(x: Tensor, last: int, layout: str) -> Tensor:
    """Allocate what has one row of `last` entries for each row of `x`.

    It lies in memory as its layout says, or with heads and rows exchanged where those of `x` are:
    models that view (B, T, N, H) as (B, N, T, H) view the result back without a copy.
    """
    if layout == "BNTH" and x.stride(1) < x.stride(2):
        b, n, t, _ = x.shape
        return x.new_empty((b, t, n, last)).transpose(1, 2)
    return x.new_empty((*x.shape[:-1], last))


def empty_out(q: Tensor, k: Tensor, v: Tensor, layout: str) -> Tensor:
    """Allocate the output, which lies in memory as torch's own would.

    That is as the queries do, dims that are expanded apart, where torch takes its flash kernel,
    and contiguous where it takes its unfused path (other value dims, a last dim with strides).
    """
    last = v.shape[-1]
    dense = q.stride(-1) == 1 and k.stride(-1) == 1 and v.stride(-1) == 1
    if layout == "BNTH" and last == q.shape[-1] and dense:
        out = torch.empty_like(q)
        if out.stride(-1) == 1:  # of overlapping rows it may be another
            return out
    return q.new_empty((*q.shape[:-1], last))


def empty_lse(q: Tensor, layout: str) -> Tensor:
    """Allocate the lse: (B, N, T) float32, (N, total) when packed."""
    if layout == "packed":
        return q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    b, n, t = (0, 2, 1) if layout == "BTNH" else (0, 1, 2)
    return q.new_empty((q.shape[b], q.shape[n], q.shape[t]), dtype=torch.float32)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    constants: Constants,
    wants_lse: bool,
    quantised: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the forward kernel; tensors in the call's layout, of one dtype, any strides.

    `quantised`: k and v are codes, and this is what
    :func:`~polyattn.backends.native_cpu.torch.arguments.quantised_argument` says of them.
    """
    layout, scale, softcap = constants
    out = empty_out(q, k, v, layout)
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    found, packed, sequences = terms_of(extras.codes, extras.arrays, layout)
    bias, slopes, sinks = _in_kernel_dtypes(extras)
    lse = empty_lse(q, layout) if wants_lse else None
    sizes = sizes_of(q, k, v, layout, sequences)
    _run(
        module.load().forward, _isa(q, sizes, layout), torch.get_num_threads(), DTYPES[q.dtype],
        sizes, scale, softcap,
        array(q, layout), array(k, layout), array(v, layout), array(out, layout),
        None if lse is None else rows(lse, layout), found, packed,
        None if bias is None else bias_argument(bias),
        None if slopes is None else slopes_argument(slopes),
        None if sinks is None else sinks_argument(sinks), None, quantised,
    )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Extras,
    constants: Constants,
    needs: Needs,
) -> Gradients:
    """Run the backward kernel; returns the gradients of q, k, v, and of bias and sinks if wanted.

    `dout`, `dlse`: the gradients that come in, None for zeros.
    """
    layout, scale, softcap = constants
    dq, dk, dv = (empty_like_rows(x, x.shape[-1], layout) for x in (q, k, v))
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    dout = torch.zeros_like(out) if dout is None else dense_rows(dout.to(out.dtype))
    lse, delta = lse.contiguous(), _delta(dout, out, dlse, layout)
    found, packed, sequences = terms_of(extras.codes, extras.arrays, layout)
    bias, slopes, sinks = _in_kernel_dtypes(extras)
    dbias = None
    if needs.bias and bias is not None:
        if any(n > 1 and s == 0 for n, s in zip(bias.shape, bias.stride(), strict=True)):
            bias = bias.contiguous()  # each of its entries has a gradient of its own
        dbias = bias.new_zeros(bias.shape, dtype=torch.float32)
    sizes = sizes_of(q, k, v, layout, sequences)
    _run(
        module.load().backward, _isa(q, sizes, layout), torch.get_num_threads(), DTYPES[q.dtype],
        sizes, scale, softcap,
        array(q, layout), array(k, layout), array(v, layout), rows(lse, layout), found, packed,
        None if bias is None else bias_argument(bias),
        None if slopes is None else slopes_argument(slopes),
        None if sinks is None else sinks_argument(sinks),
        array(dout, layout), rows(delta, layout), array(dq, layout), array(dk, layout),
        array(dv, layout), None if dbias is None else _dbias_argument(dbias),
    )  # fmt: skip
    if dbias is not None and extras.bias is not None:
        dbias = dbias.to(extras.bias.dtype)
    dsinks = None
    if needs.sinks and extras.sinks is not None:
        dsinks = _sinks_gradient(extras.sinks, lse, delta, layout)
    return dq, dk, dv, dbias, dsinks


def _isa(q: Tensor, sizes: Sizes, layout: str) -> int:
    """Return which compiled form runs the call, forward and backward the same."""
    sequences = sizes.batch if layout == "packed" else 1
    return isa_for(DTYPES[q.dtype], sizes.q_len, sizes.heads, sizes.kv_heads, sequences)


def _run(kernel: Callable[..., None], *arguments: Any) -> None:
    try:
        kernel(*arguments)
    except ValueError as error:
        raise InvalidProblem(f"got a call that the kernels refuse: {error}.") from error


def dense_rows(x: Tensor) -> Tensor:
    """Return `x` with a contiguous last dim, at the address where its values are as they count."""
    x = as_it_counts(x)
    return x.contiguous() if x.stride(-1) != 1 and x.shape[-1] != 1 else x


def as_it_counts(x: Tensor) -> Tensor:
    """Return `x` with its values in memory: not negated by a flag, nor zeros that none holds."""
    if is_zero_tensor(x):
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return x.resolve_neg()


def _narrowed(bias: Tensor) -> Tensor:
    """Return float64 as float32, with no number made infinite: that would hide its key."""
    most = torch.finfo(torch.float32).max
    return torch.where(bias.isinf(), bias, bias.clamp(-most, most)).float()


def _in_kernel_dtypes(extras: Extras) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return bias, slopes and sinks as the kernels read them."""
    bias, slopes, sinks = extras.bias, extras.slopes, extras.sinks
    if bias is not None:
        bias = as_it_counts(bias if bias.dtype in DTYPES else _narrowed(bias))
    if slopes is not None:
        slopes = as_it_counts(slopes.float())
    if sinks is not None:
        sinks = as_it_counts(sinks.float()).contiguous()
    return bias, slopes, sinks


def _delta(dout: Tensor, out: Tensor, dlse: Tensor | None, layout: str) -> Tensor:
    """Return sum(dout * out) - dlse for each query: (B, N, T) float32, (N, total) when packed."""
    sums = (dout.float() * out).sum(-1)
    if layout != "BNTH":
        sums = sums.transpose(-1, -2)
    return sums if dlse is None else sums - dlse.float()


def _dbias_argument(dbias: Tensor) -> tuple[int, ...]:
    pointer, size, _, *strides = bias_argument(dbias)
    return pointer, size, *strides


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor, layout: str) -> Tensor:
    """Return -sum over queries of exp(sink - lse) * delta, in the shape and dtype of the sinks."""
    if layout == "packed":
        lse, delta = lse.unsqueeze(0), delta.unsqueeze(0)
    logits = sinks.float().reshape(sinks.shape[0], -1)
    total = []
    for logit in logits.unbind(1):  # one sink at a time: no array larger than the lse
        shares = torch.exp(logit.view(1, -1, 1) - lse)
        shares = torch.where(lse == float("-inf"), 0.0, shares)  # no key, and sinks of -inf
        total.append(-(shares * delta).sum((0, 2)))
    return torch.stack(total, 1).reshape(sinks.shape).to(sinks.dtype)
