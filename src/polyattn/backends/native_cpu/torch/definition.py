"""Attention, its gradients and their gradients by the definition, in plain operations of torch.

What the kernels have no derivative of is taken from here: all of it can be differentiated again,
in reverse and in forward mode, to any order, and mapped. It materialises the scores, in float32
at least.

The arrays of this module are (B, K, R, ...): the rows of the N // K query heads that share a
key/value head lie one after the other, R = N // K * T, so that no key is repeated. Entries that
are not finite are taken out of the products and put back as NaN where they are attended to:
0 * NaN would carry what is masked into rows that do not see it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyattn.backends.native_cpu.torch.calls import Constants, Extras, Needs
from polyattn.backends.native_cpu.torch.decoded import allowed_by
from polyattn.masks.biases import Alibi, DenseBias
from polyattn.torch.kit.layouts import from_bnth, lse_from_bnt, to_bnth
from polyattn.torch.kit.masking import Dims, dense_bias, four_dims
from polyattn.torch.kit.nonfinite import spread_values

__all__ = [
    "Directions",
    "SecondGradients",
    "defined_attention",
    "defined_gradients",
    "defined_second_gradients",
]

Maybe = Tensor | None
NAN = float("nan")


class _Rows:
    """From arrays in the call's layout to (B, K, R, ...) and back."""

    def __init__(self, q: Tensor, k: Tensor, layout: str) -> None:
        self.layout = layout
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.dims = Dims.of(to_bnth(q, layout), to_bnth(k, layout))
        self.groups = self.dims.heads // self.dims.kv_heads

    def fold(self, x: Tensor) -> Tensor:
        """Return a query, a key, a value or an output, (B, K, R|S, ...)."""
        return self._joined(to_bnth(x, self.layout).to(self.dtype))

    def fold_sums(self, x: Tensor) -> Tensor:
        """Return one number for each query, given as the lse is, (B, K, R, 1)."""
        x = x.unsqueeze(0) if self.layout == "packed" else x
        return self._joined(x.to(self.dtype).unsqueeze(-1))

    def fold_scores(self, x: Tensor) -> Tensor:
        """Return what broadcasts to (B, N, T, S) as what broadcasts to (B, K, R, S)."""
        if self.groups == 1 or (x.shape[1] == 1 and x.shape[2] == 1):
            return x
        return self._joined(x.expand(-1, self.dims.heads, self.dims.q_len, -1))

    def fold_sinks(self, sinks: Tensor) -> Tensor:
        """Return sinks (N,) or (N, M) as (1, K, R, M)."""
        d = self.dims
        each = sinks.to(self.dtype).reshape(1, d.heads, 1, -1).expand(-1, -1, d.q_len, -1)
        return self._joined(each)

    def _joined(self, x: Tensor) -> Tensor:
        if self.groups == 1 or x.shape[1] != self.dims.heads:
            return x
        return x.unflatten(1, (self.dims.kv_heads, self.groups)).flatten(2, 3)

    def unfold(self, x: Tensor, like: Tensor) -> Tensor:
        """Return the gradient of `like`, of its shape and dtype, from (B, K, R|S, ...)."""
        heads = to_bnth(like, self.layout).shape[1]
        return from_bnth(self.apart(x, heads), self.layout).to(like.dtype)

    def unfold_sums(self, x: Tensor) -> Tensor:
        """Undo :meth:`fold_sums`."""
        return lse_from_bnt(self.apart(x, self.dims.heads).squeeze(-1), self.layout)

    def unfold_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        """Sum the gradient of the scores to that of a bias."""
        x = self.apart(x, self.dims.heads)
        shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
        shared = [i for i, size in enumerate(shape) if size == 1]
        x = x.sum(shared, keepdim=True) if shared else x
        return x.reshape(bias.shape).to(bias.dtype)

    def unfold_sinks(self, x: Tensor, sinks: Tensor) -> Tensor:
        """Sum (B, K, R, M) to the gradient of the sinks."""
        x = self.apart(x, self.dims.heads)
        return x.sum((0, 2)).reshape(sinks.shape).to(sinks.dtype)

    def apart(self, x: Tensor, heads: int) -> Tensor:
        if self.groups == 1 or x.shape[1] == heads:
            return x
        return x.unflatten(2, (self.groups, -1)).flatten(1, 2)


class _Attention(NamedTuple):
    """A call up to its weights. `weights` (B, K, R, S); `sink_weights` (B, K, R, M).

    `capped`: the scores after the soft cap, `slope`: its derivative there; None without a cap.
    `bad_values`: keys whose value holds what is not finite, where they are attended to.
    """

    rows: _Rows
    q: Tensor
    k: Tensor
    v: Tensor
    allowed: Tensor
    weights: Tensor
    sink_weights: Maybe
    lse: Tensor
    capped: Maybe
    slope: Maybe
    bad_values: Tensor

    def visible(self, x: Tensor) -> Tensor:
        """Return what a score has, 0 where it is masked."""
        return torch.where(self.allowed, x, 0)


def _attention(q: Tensor, k: Tensor, v: Tensor, extras: Extras, constants: Constants) -> _Attention:
    layout, scale, softcap = constants
    rows = _Rows(q, k, layout)
    q, k, v = rows.fold(q), rows.fold(k), rows.fold(v)
    allowed = allowed_by(extras.codes, extras.arrays, rows.dims, q.device)
    allowed = rows.fold_scores(allowed).expand(*q.shape[:3], k.shape[2])
    bad_q, bad_k, bad_v = (_bad_rows(x) for x in (q, k, v))
    q, k = _finite(q), _finite(k)
    scores = (q * scale) @ k.transpose(-1, -2)
    capped = slope = None
    if softcap:
        share = torch.tanh(scores / softcap)
        scores = capped = softcap * share
        slope = 1 - share.square()
    bias = _bias(rows, extras)
    scores = scores if bias is None else scores + bias
    scores = torch.where(bad_q | bad_k.transpose(-1, -2), NAN, scores)
    scores = torch.where(allowed, scores, float("-inf"))
    sinks = None if extras.sinks is None else rows.fold_sinks(extras.sinks)
    weights, sink_weights, lse = _softmax(scores, sinks)
    weights = torch.where(allowed, weights, 0)  # which are NaN in the rows of bad scores
    bad_values = allowed & bad_v.transpose(-1, -2)
    return _Attention(
        rows, q, k, v, allowed, weights, sink_weights, lse, capped, slope, bad_values
    )  # fmt: skip


def _bad_rows(x: Tensor) -> Tensor:
    return ~x.isfinite().all(-1, keepdim=True)


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0)


def _bias(rows: _Rows, extras: Extras) -> Maybe:
    if extras.bias is not None:
        return rows.fold_scores(dense_bias(DenseBias(extras.bias), rows.dims, rows.dtype))
    if extras.slopes is not None:
        return rows.fold_scores(dense_bias(Alibi(extras.slopes), rows.dims, rows.dtype))
    return None


def _softmax(scores: Tensor, sinks: Maybe) -> tuple[Tensor, Maybe, Tensor]:
    """Return the weights of keys and of sinks, and the lse; all 0 and -inf without any key."""
    whole = scores
    if sinks is not None:
        whole = torch.cat([scores, sinks.expand(scores.shape[0], -1, -1, -1)], -1)
    peak = whole.detach().amax(-1, keepdim=True)
    peak = torch.where(peak == float("-inf"), 0, peak)
    parts = torch.exp(whole - peak)
    total = parts.sum(-1, keepdim=True)
    nothing = total == 0
    total = torch.where(nothing, 1, total)
    weights = parts / total
    lse = torch.where(nothing, float("-inf"), total.log() + peak)
    if sinks is None:
        return weights, None, lse
    keys = scores.shape[-1]
    return weights[..., :keys], weights[..., keys:], lse


def defined_attention(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, constants: Constants
) -> tuple[Tensor, Tensor]:
    """Return out in the dtype of `q` and lse float32 at least, as the forward kernel does."""
    at = _attention(q, k, v, extras, constants)
    out = at.weights @ _finite(at.v)
    out = spread_values(out, at.v, at.allowed, 1)
    out = from_bnth(at.rows.apart(out, at.rows.dims.heads), constants.layout).to(q.dtype)
    return out, at.rows.unfold_sums(at.lse)


class _Incoming(NamedTuple):
    """What comes in to a backward pass, and what all gradients need of it.

    `dout` (B, K, R, V) and `dlse` (B, K, R, 1), None for zeros; `dweights`: by the weights,
    (B, K, R, S); `excess`: dlse - sum(weights * dweights), (B, K, R, 1); `bad`: the rows whose
    `dout` is not finite, where they attend.
    """

    dout: Maybe
    dweights: Tensor
    excess: Tensor
    bad: Maybe


def _incoming(dout: Maybe, dlse: Maybe, at: _Attention) -> _Incoming:
    dweights, bad = torch.zeros_like(at.weights), None
    if dout is not None:
        dout = at.rows.fold(dout)
        bad = at.allowed & _bad_rows(dout)
        dout = _finite(dout)
        dweights = dout @ _finite(at.v).transpose(-1, -2)
        dweights = torch.where(bad | at.bad_values, NAN, dweights)
    excess = -at.visible(at.weights * dweights).sum(-1, keepdim=True)
    if dlse is not None:
        excess = excess + at.rows.fold_sums(dlse)
    return _Incoming(dout, dweights, excess, bad)


def defined_gradients(
    dout: Maybe,
    dlse: Maybe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    constants: Constants,
    needs: Needs,
) -> tuple[Tensor, Tensor, Tensor, Maybe, Maybe]:
    """Return the gradients of q, k, v, and of bias and sinks if wanted."""
    at = _attention(q, k, v, extras, constants)
    come, rows, scale = _incoming(dout, dlse, at), at.rows, constants.scale
    dscores = at.visible(at.weights * (come.dweights + come.excess))
    dproducts = dscores if at.slope is None else at.visible(dscores * at.slope)
    dq, dk = scale * (dproducts @ at.k), scale * (dproducts.transpose(-1, -2) @ at.q)
    dv = torch.zeros_like(at.v)
    if come.dout is not None and come.bad is not None:
        dv = torch.where(come.bad, NAN, at.weights).transpose(-1, -2) @ come.dout
    dbias = dsinks = None
    if needs.bias and extras.bias is not None:
        dbias = rows.unfold_bias(dscores, extras.bias)
    if needs.sinks and extras.sinks is not None and at.sink_weights is not None:
        dsinks = rows.unfold_sinks(at.sink_weights * come.excess, extras.sinks)
    return rows.unfold(dq, q), rows.unfold(dk, k), rows.unfold(dv, v), dbias, dsinks


class Directions(NamedTuple):
    """What comes in to the derivative of a backward pass: one for each gradient that it returned.

    None for zeros; each in the shape of its gradient.
    """

    q: Maybe
    k: Maybe
    v: Maybe
    bias: Maybe
    sinks: Maybe


class SecondGradients(NamedTuple):
    """The gradients of what a backward pass took; None where there is no such input."""

    dout: Maybe
    dlse: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Maybe
    sinks: Maybe


def defined_second_gradients(
    along: Directions,
    dout: Maybe,
    dlse: Maybe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    constants: Constants,
) -> SecondGradients:
    """Differentiate the sum of gradients times directions by everything the gradients hang on.

    That sum is, with t the change of the scores along the directions, g = dout . v:
    ``sum p (g t + dout . direction of v) + (dlse - sum p g) tau``, ``tau = sum p t`` with sinks.
    """
    at = _attention(q, k, v, extras, constants)
    come, rows, scale = _incoming(dout, dlse, at), at.rows, constants.scale
    moved = _moved(along, at, scale, extras)
    weights, excess = at.weights, come.excess
    change = at.visible(weights * (moved.scores - moved.lse))  # of the weights
    dscores = at.visible(weights * (come.dweights + excess))
    dproducts = dscores if at.slope is None else at.visible(dscores * at.slope)
    both, sinks = _second_scores(come, moved, at)
    products = both
    if at.slope is not None and at.capped is not None:
        bend = -2 * at.capped / constants.softcap**2  # the slope's own derivative
        products = at.visible((both + bend * dscores * moved.products) * at.slope)
    dq = products @ at.k if moved.k is None else products @ at.k + dproducts @ moved.k
    turned = products.transpose(-1, -2) @ at.q
    dk = turned if moved.q is None else turned + dproducts.transpose(-1, -2) @ moved.q
    dv = torch.zeros_like(at.v) if come.dout is None else change.transpose(-1, -2) @ come.dout
    ddout = change @ _finite(at.v)
    ddout = ddout if moved.v is None else ddout + weights @ moved.v
    return SecondGradients(
        None if dout is None else rows.unfold(ddout, dout),
        rows.unfold_sums(moved.lse),
        rows.unfold(scale * dq, q),
        rows.unfold(scale * dk, k),
        rows.unfold(dv, v),
        None if extras.bias is None else rows.unfold_bias(both, extras.bias),
        None if extras.sinks is None or sinks is None else rows.unfold_sinks(sinks, extras.sinks),
    )


class _Moved(NamedTuple):
    """The directions, folded, and what moves along them: products q . k, scores, and the lse."""

    q: Maybe
    k: Maybe
    v: Maybe
    sinks: Maybe
    products: Tensor
    scores: Tensor
    lse: Tensor


def _moved(along: Directions, at: _Attention, scale: float, extras: Extras) -> _Moved:
    rows = at.rows
    q, k, v = (None if x is None else rows.fold(x) for x in along[:3])
    products = torch.zeros_like(at.weights)
    if q is not None:
        products = products + scale * (q @ at.k.transpose(-1, -2))
    if k is not None:
        products = products + scale * (at.q @ k.transpose(-1, -2))
    products = at.visible(products)
    scores = products if at.slope is None else products * at.slope
    if along.bias is not None and extras.bias is not None:
        scores = scores + rows.fold_scores(four_dims(along.bias).to(rows.dtype))
    scores = at.visible(scores)
    lse = at.visible(at.weights * scores).sum(-1, keepdim=True)
    sinks = None
    if along.sinks is not None and at.sink_weights is not None:
        sinks = rows.fold_sinks(along.sinks)
        lse = lse + (at.sink_weights * sinks).sum(-1, keepdim=True)
    return _Moved(q, k, v, sinks, products, scores, lse)


def _second_scores(come: _Incoming, moved: _Moved, at: _Attention) -> tuple[Tensor, Maybe]:
    """Return the gradient of the scores through the weights, and that of the sinks."""
    by_weight = (come.dweights + come.excess) * moved.scores - come.dweights * moved.lse
    if come.dout is not None and moved.v is not None:
        by_weight = by_weight + at.visible(come.dout @ moved.v.transpose(-1, -2))
    mean = at.visible(at.weights * by_weight).sum(-1, keepdim=True)
    if at.sink_weights is None:
        return at.visible(at.weights * (by_weight - mean)), None
    by_sink = (
        come.excess * moved.sinks if moved.sinks is not None else torch.zeros_like(come.excess)
    )
    mean = mean + (at.sink_weights * by_sink).sum(-1, keepdim=True)
    return at.visible(at.weights * (by_weight - mean)), at.sink_weights * (by_sink - mean)
