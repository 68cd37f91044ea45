"""Right first: a candidate's results against the float64 reference, before its time may count.

Large problems are checked on evenly spread query rows: every row is computed by itself, and
where gradients are asked for, the incoming gradient is zero in all other rows, so that the
gradients of keys and values are exactly those of the chosen rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyattn.backends.reference.torch import reference_attention
from polyattn.conformance import tolerance
from polyattn.conformance.tolerance import FEW, Yardstick
from polyattn.masks import Dense
from polyattn.masks.biases import DenseBias
from polyattn.measure.inputs import Inputs
from polyattn.problem import Problem
from polyattn.torch.kit.layouts import from_bnth, to_bnth
from polyattn.torch.kit.masking import Dims, dense_bias, materialise

__all__ = ["Check", "Truth"]

_MOST_SCORES = 1 << 22
_FEWEST_ROWS = 16


@dataclass(frozen=True)
class Check:
    """How far a result is from the truth, in units of its terms, and how far it may be."""

    error: float
    tolerance: float
    verified: bool
    message: str = ""


class Truth:
    """The float64 results of one call, on some of its query rows."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        problem = inputs.problem.with_(layout="BNTH", dropout_p=0.0, lse=True)
        self._problem = problem
        longest = max(problem.q_len, problem.kv_len, problem.head_dim, problem.value_dim)
        self._terms = longest * (problem.heads // max(problem.kv_heads, 1))
        rows = max(_FEWEST_ROWS, _MOST_SCORES // max(1, problem.heads * _spread(problem)))
        count = min(problem.q_len, rows)
        self.rows = torch.linspace(0, problem.q_len - 1, count).round().long().unique()
        self.grad_out = self._only_rows(inputs.grad_out)
        values, self._score, self._scale = self._reference(torch.float64)
        self._exact = values

    @functools.cached_property
    def _baseline(self) -> dict[str, Tensor]:
        wide = torch.float64 if self.inputs.problem.dtype == "float64" else torch.float32
        return self._reference(wide)[0]

    def check(self, got: Mapping[str, Tensor]) -> Check:
        """Compare the results of a candidate (out, lse, gradients by name) with the truth."""
        worst = Check(0.0, 0.0, True)
        for name, exact in self._exact.items():
            if name not in got:
                continue
            found = self._rows_of(name, got[name])
            baseline: Callable[[], Tensor] = functools.partial(self._baseline.__getitem__, name)
            half = name == "lse" and self.inputs.problem.dtype in ("float16", "bfloat16")
            truth = Yardstick(
                name, exact, self._scale[name], self._score, baseline, self._terms, half=half
            )
            fault = tolerance.measure(found, truth)
            error, allowed = self._numbers(found, truth)
            if fault is not None:
                return Check(error if error == error else math.inf, allowed, False, str(fault))
            if error / (allowed or 1.0) >= worst.error / (worst.tolerance or 1.0):
                worst = Check(error, max(allowed, error), True)
        return worst

    def _numbers(self, found: Tensor, truth: Yardstick) -> tuple[float, float]:
        """Return the error that the tolerance module judges, and the bound, for the table."""
        wide = torch.finfo(torch.promote_types(found.dtype, torch.float32)).eps
        room = FEW * (
            (2.0**-14 if truth.half else torch.finfo(found.dtype).eps) + wide * truth.score
        )

        def error(values: Tensor) -> float:
            same = values.double().cpu() == truth.exact
            distance = torch.where(same, 0, (values.double().cpu() - truth.exact).abs())
            ratio = distance / (truth.scale + torch.finfo(found.dtype).tiny)
            return float(ratio.max()) if ratio.numel() else 0.0

        return error(found), 2 * error(truth.baseline().to(found.dtype)) + room

    def _only_rows(self, grad_out: Tensor) -> Tensor:
        rows = to_bnth(grad_out, self.inputs.problem.layout)
        kept = torch.zeros_like(rows)
        kept[:, :, self.rows] = rows[:, :, self.rows]
        return from_bnth(kept, self.inputs.problem.layout)

    def _rows_of(self, name: str, x: Tensor) -> Tensor:
        """Return the chosen rows of a result, as the truth has them: (B, N, T, H) on the CPU."""
        layout = self.inputs.problem.layout
        if name == "bias":
            return x.detach().cpu()
        if name == "lse":
            lse = x.detach().cpu().reshape(-1, *x.shape[-2:])
            return lse[:, :, self.rows]
        x = to_bnth(x.detach().cpu(), layout)
        return x[:, :, self.rows] if name in ("out", "query") else x

    def _reference(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
        call, problem = self.inputs, self._problem
        q, k, v = (
            to_bnth(x.detach().cpu(), call.problem.layout).to(dtype)
            for x in (call.q, call.k, call.v)
        )
        dims = Dims.of(q, k)
        mask = payload = None
        bias: DenseBias | None = None
        if call.mask is not None:
            dense = materialise(call.mask.map(_to_cpu), dims, torch.device("cpu"))
            mask = Dense(self._at_rows(dense))
        if call.bias is not None:
            payload = call.bias.payload.detach().cpu().to(dtype)
            payload.requires_grad_(call.problem.bias_grad)
            same = call.bias.map(lambda _, x: payload)
            bias = DenseBias(self._at_rows(dense_bias(same, dims, dtype)))
        q = q[:, :, self.rows]
        leaves = {"query": q, "key": k, "value": v, "bias": payload}
        wanted = {n: x for n, x in leaves.items() if n in call.leaves and x is not None}
        for x in wanted.values():
            x.requires_grad_()
        sinks = None if call.sinks is None else call.sinks.detach().cpu()
        with torch.set_grad_enabled(bool(wanted)):
            out, lse = reference_attention(problem, q, k, v, mask, bias, sinks, dtype)
            values = {"out": out, "lse": lse}
            g = to_bnth(self.grad_out.cpu(), call.problem.layout)[:, :, self.rows].to(dtype)
            if wanted:
                grads = torch.autograd.grad(out, list(wanted.values()), g, retain_graph=True)
                values |= dict(zip(wanted, grads, strict=True))
        with torch.set_grad_enabled(payload is not None and payload.requires_grad):
            score, scale = _scales(
                problem, q.detach(), k.detach(), v.detach(), mask, bias, lse.detach(), g, payload
            )
        return {name: x.detach() for name, x in values.items()}, score, scale

    def _at_rows(self, dense: Tensor) -> Tensor:
        return dense[:, :, self.rows] if dense.shape[2] > 1 else dense


def _spread(p: Problem) -> int:
    return max(1, p.batch if p.layout != "packed" else 1) * max(1, p.kv_len)


def _to_cpu(name: str, x: object) -> object:
    if x is None:
        return None
    return x.cpu() if isinstance(x, Tensor) else torch.as_tensor(x)


def _scales(
    p: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Dense | None,
    bias: DenseBias | None,
    lse: Tensor,
    g: Tensor,
    payload: Tensor | None,
) -> tuple[float, dict[str, Tensor]]:
    """Return the largest magnitude behind a score, and for each value the sum of its terms'."""
    groups = max(1, q.shape[1] // max(1, k.shape[1]))
    factor = abs(p.scale) if p.scale is not None else 1 / math.sqrt(p.head_dim)
    sign = math.copysign(1.0, p.scale) if p.scale is not None else 1.0
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    s = q @ k.mT * (factor * sign)
    size = q.abs() @ k.abs().mT * factor
    if p.softcap is not None:
        s = p.softcap * torch.tanh(s / p.softcap)
    if bias is not None:
        added = bias.payload.detach()
        s, size = s + added, size + torch.where(added.isfinite(), added.abs(), 0)
    seen = torch.ones((), dtype=torch.bool) if mask is None else mask.mask
    weights = torch.where(seen & (s > -math.inf), torch.exp(s - lse.unsqueeze(-1)), 0)
    weights = torch.nan_to_num(weights, 0.0, 0.0, 0.0)
    score = float(torch.where(seen, size, 0).max()) if size.numel() else 0.0
    g = g.abs()
    dp = g @ v.abs().mT
    ds = weights * (dp + (weights * dp).sum(-1, keepdim=True))

    def shared(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, groups)).sum(2)

    scale = {
        "out": weights @ v.abs(), "lse": torch.ones_like(lse), "query": ds @ k.abs() * factor,
        "key": shared(ds.mT @ q.abs()) * factor, "value": shared(weights.mT @ g),
    }  # fmt: skip
    if payload is not None and bias is not None and payload.requires_grad:
        whole = bias.payload.expand(ds.shape)
        scale["bias"] = torch.autograd.grad(whole, payload, ds)[0].abs()
    return score, {name: x.detach() for name, x in scale.items()}
