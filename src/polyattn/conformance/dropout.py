"""Dropout is random, so it is judged by its laws: seeds, p = 0, and the mean."""

from __future__ import annotations

import torch

from polyattn.conformance.cases import Case
from polyattn.conformance.check import Verdict
from polyattn.conformance.inputs import build
from polyattn.selection.registry import Backend
from polyattn.torch import attention
from polyattn.torch.admission import admit

__all__ = ["examine_dropout"]

_REPEATS = 4


def examine_dropout(backend: Backend, seed: int = 0, device: str = "cpu") -> Verdict:
    """Check a backend that accepts dropout; ``refused`` where it does not."""
    case = Case(seed=seed, b=2, t=33, s=64, n=2, k=2, h=16, v=16, dtype=_dtype(backend, device))
    inputs = build(case, device)
    q, k = inputs.q, inputs.k
    v = torch.ones_like(inputs.v)  # each output is the sum of the row's surviving probabilities
    problem = admit(q, k, v, dropout_p=0.25).problem
    if reasons := backend.check(problem):
        return Verdict("refused", "; ".join(map(str, reasons)))

    def run(p: float, with_seed: int) -> torch.Tensor:
        torch.manual_seed(with_seed)
        out: torch.Tensor = attention(q, k, v, dropout_p=p, backend=backend.name)
        return out

    takes_all = not backend.check(admit(q, k, v, dropout_p=1.0).problem)
    with torch.random.fork_rng(devices=[] if device == "cpu" else None):
        try:
            fault = _fault(run, seed, takes_all)
        except Exception as error:  # whatever a kernel raises is the finding
            return Verdict("false_acceptance", f"dropout: {type(error).__name__}: {error}")
    return Verdict("wrong", f"dropout: {fault}") if fault else Verdict("right")


def _fault(run: object, seed: int, takes_all: bool) -> str | None:
    assert callable(run)
    if not torch.equal(run(0.25, seed), run(0.25, seed)):
        return "the same seed gives another result"
    if torch.equal(run(0.25, seed), run(0.25, seed + 1)):
        return "another seed gives the same result"
    if bool((run(0.0, seed) - 1).abs().max() > 0.02):
        return "p = 0 is not the identity"
    if takes_all and bool((run(1.0, seed) != 0).any()):
        return "p = 1 leaves something"
    for p in (0.1, 0.5):
        sums = torch.stack([run(p, seed + i)[..., 0].double() for i in range(_REPEATS)])
        # each of the rows' sums has mean 1 and variance p / (1 - p) * sum_j w_j^2, about 1/20
        error = float((sums.mean() - 1).abs())
        if error > 6 * (p / (1 - p) / 10 / sums.numel()) ** 0.5:
            return f"p = {p} changes the mean of the outputs by {error:.3g}"
    return None


def _dtype(backend: Backend, device: str) -> str:
    dtypes = backend.capabilities_for(device).dtypes
    return "float32" if "float32" in dtypes else min(dtypes, default="float32")
