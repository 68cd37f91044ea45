"""Right first: what a way gives, against float64 on some of the query rows.

Every row is computed by itself, so a few evenly spread ones are enough for the output and the
gradient of the query; with the incoming gradient zero in all other rows, the gradients of keys
and values are exactly those of the chosen rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from polyattn.bench.cpu.case_arrays import Inputs
from polyattn.bench.cpu.ways import Way
from polyattn.conformance import tolerance
from polyattn.conformance.tolerance import Yardstick

__all__ = ["Truth"]

ROWS = 16


class Truth:
    """The float64 results of a case on some rows, by name: out, and the gradients if it trains.

    `of`: the same inputs on another device, where the ways are that are checked.
    """

    def __init__(self, inputs: Inputs, rows: int = ROWS, of: Inputs | None = None) -> None:
        self.inputs = inputs
        self._of = inputs if of is None else of
        length = inputs.case.size.q_len
        count = min(length, rows)
        self.rows = torch.linspace(0, length - 1, count).round().long().unique()
        self._exact = self._reference(torch.float64)
        self._score, self._scale = self._scales()

    @functools.cached_property
    def _baseline(self) -> dict[str, Tensor]:
        return self._reference(torch.float32)

    def check(self, way: Way) -> tuple[dict[str, float], str]:
        """Return the relative error of each result of a way, and what is wrong, if anything is."""
        errors, wrong = {}, ""
        for name, given in self._results(way).items():
            found = given.cpu()
            exact = self._exact[name]
            distance = (found.double() - exact).norm() / exact.norm()
            errors[name] = float(f"{float(distance):.3g}")
            truth = Yardstick(
                name,
                exact,
                self._scale[name],
                self._score,
                functools.partial(self._baseline.__getitem__, name),
                terms=self.inputs.case.size.kv_len,
            )
            wrong = wrong or str(tolerance.measure(found, truth) or "")
        return errors, wrong

    def _results(self, way: Way) -> dict[str, Tensor]:
        call = self._of
        with way.scope():
            out = way.call(call.q, call.k, call.v)
            if not call.case.train:
                return {"out": call.heads_second(out)[:, :, self.rows]}
            g = torch.zeros_like(call.grad_out)
            call.heads_second(g)[:, :, self.rows] = call.heads_second(call.grad_out)[
                :, :, self.rows
            ]
            grads = torch.autograd.grad(out, (call.q, call.k, call.v), g)
        dq, dk, dv = (call.heads_second(x) for x in grads)
        out = call.heads_second(out.detach())
        return {"out": out[:, :, self.rows], "query": dq[:, :, self.rows], "key": dk, "value": dv}

    def _wide(self, dtype: torch.dtype) -> Iterator[tuple[Tensor, ...]]:
        """Yield the entries of the batch, one after the other: a long cache is large in float64.

        Each is the chosen rows of q and grad_out, those of a group's heads below each other,
        (K, G * R, H); k and v, (K, S, H); and what is allowed, (1, R or 1, S), or nothing at all.
        """
        call, kv_heads = self.inputs, self.inputs.case.size.kv_heads
        for entry in range(call.case.size.batch):
            q, k, v, g = (
                call.heads_second(x.detach())[entry]
                for x in (call.q, call.k, call.v, call.grad_out)
            )
            q, g = (x[:, self.rows].unflatten(0, (kv_heads, -1)).flatten(1, 2) for x in (q, g))
            yield *(x.to(dtype) for x in (q, k, v, g)), self._allowed(entry)

    def _allowed(self, entry: int) -> Tensor:
        allowed = self.inputs.allowed
        if allowed is None:
            return torch.empty(0, dtype=torch.bool)
        of_entry = allowed[entry if allowed.shape[0] > 1 else 0]
        return of_entry if of_entry.shape[1] == 1 else of_entry[:, self.rows]

    def _scores(self, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
        s = q @ k.mT / math.sqrt(q.shape[-1])
        if not allowed.numel():
            return s
        by_head = s.unflatten(1, (-1, len(self.rows)))
        return by_head.masked_fill(~allowed, -math.inf).flatten(1, 2)

    def _by_head(self, x: Tensor) -> Tensor:
        """Return rows of all heads, (1, N, R, H), from those of groups."""
        return x.unflatten(1, (-1, len(self.rows))).flatten(0, 1).unsqueeze(0)

    def _reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        trains = self.inputs.case.train
        found: dict[str, list[Tensor]] = {}
        for q, k, v, g, allowed in self._wide(dtype):
            leaves = [x.requires_grad_(trains) for x in (q, k, v)]
            out = self._scores(q, k, allowed).softmax(-1) @ v
            found.setdefault("out", []).append(self._by_head(out.detach()))
            if trains:
                dq, dk, dv = torch.autograd.grad(out, leaves, g)
                found.setdefault("query", []).append(self._by_head(dq))
                found.setdefault("key", []).append(dk.unsqueeze(0))
                found.setdefault("value", []).append(dv.unsqueeze(0))
        return {name: torch.cat(entries) for name, entries in found.items()}

    def _scales(self) -> tuple[float, dict[str, Tensor]]:
        """Return the largest magnitude behind a score, and the sum of the magnitudes of terms."""
        largest = 0.0
        found: dict[str, list[Tensor]] = {}
        for q, k, v, g, allowed in self._wide(torch.float64):
            factor = 1 / math.sqrt(q.shape[-1])
            size = q.abs() @ k.abs().mT * factor
            largest = max(largest, float(size.max()))
            weights = self._scores(q, k, allowed).softmax(-1)
            found.setdefault("out", []).append(self._by_head(weights @ v.abs()))
            if not self.inputs.case.train:
                continue
            dp = g.abs() @ v.abs().mT
            ds = weights * (dp + (weights * dp).sum(-1, keepdim=True))
            found.setdefault("query", []).append(self._by_head(ds @ k.abs()) * factor)
            found.setdefault("key", []).append((ds.mT @ q.abs()).unsqueeze(0) * factor)
            found.setdefault("value", []).append((weights.mT @ g.abs()).unsqueeze(0))
        return largest, {name: torch.cat(entries) for name, entries in found.items()}
