"""Small problems on which the native CPU kernels and torch's are compared on this machine.

Nothing of torch's state takes part in that or is changed by it: numbers come from a generator of
their own, and gradients, autocast and threads are afterwards as they were before.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from polyattn import settings
from polyattn.errors import SettingsError
from polyattn.masks import Causal
from polyattn.native import forms, module
from polyattn.problem import MaskFacts, Problem
from polyattn.selection import Selection, Source
from polyattn.selection.prepare import kernel_of
from polyattn.selection.processor_kind import Machine
from polyattn.selection.registry import Available
from polyattn.torch.internals import (
    function_modes,
    is_watched,
    may_be_in_backward,
    saved_tensor_hooks,
)

__all__ = ["TorchProber"]

_NATIVE, _RIVAL = "native_cpu", "sdpa_flash"
_SIZES = {  # for each thread: query heads, heads; T, S, H
    "dense": (1, 1, 768, 576, 64),  # torch's kernel takes larger blocks from 768 queries on
    "wide": (1, 1, 192, 576, 128),
    "causal": (1, 1, 384, 384, 64),
    "short": (2, 2, 192, 192, 64),
    "decode": (4, 4, 1, 1024, 64),
    "short decode": (16, 16, 1, 128, 64),
    "grouped decode": (8, 2, 1, 2048, 64),
    "small": (2, 2, 32, 64, 64),
    "small decode": (4, 4, 1, 192, 64),
    "train": (1, 1, 320, 320, 64),
}
_TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""How far two right results of numbers of about 1 may be apart."""


_PID = os.getpid()


class TorchProber:
    """torch's CPU kernels, as `polyattn.selection.platforms.Prober` wants them."""

    def machine(self) -> Machine:
        """Return this machine, with torch's threads as they are set now."""
        return _machine(torch.get_num_threads(), settings.raw(settings.NATIVE_ISA))

    def refusal(self) -> str | None:
        """Say why nothing may be tried here and now; None where it may."""
        if torch.compiler.is_compiling():
            return "a compiler traces"
        if os.getpid() != _PID:
            return "torch's threads stayed with the parent of this process"
        if is_watched() or function_modes():
            return "a mode or a transform sees every operation"
        if may_be_in_backward() != -1:
            return "a backward pass runs"
        if saved_tensor_hooks(False) is not None:
            return "hooks see every saved tensor"
        return None

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Return a scope without gradients, autocast and inference mode."""
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield

    def probe(self, dtype: str, kind: str) -> _Probe:
        """Prepare a small problem of this kind; both kernels have run once."""
        per = max(1, torch.get_num_threads())
        heads, kv_heads, t, s, h = _SIZES[kind]
        mask = MaskFacts.parse("Causal('top_left')", "top_left") if kind == "causal" else None
        problem = Problem(
            batch=1, q_len=t, kv_len=s, heads=heads * per, kv_heads=kv_heads * per, head_dim=h,
            dtype=dtype, layout="BNTH", mask=mask, grad=kind == "train",
        )  # fmt: skip
        return _Probe(problem)


@functools.lru_cache(maxsize=64)
def _machine(threads: int, isa: object) -> Machine:
    """Return this machine; `isa`: what POLYATTN_NATIVE_ISA holds, which says the kernels' forms."""
    try:
        here = isinstance(module.status(), Available)
        form = module.isas()[module.isa_index()] if here else None
        of_bfloat16 = forms.for_bfloat16().name if here else None
    except SettingsError:  # for the call to raise
        form = of_bfloat16 = None
    return Machine.here(torch.__version__, threads, form, of_bfloat16)


class _Probe:
    """Both kernels on the same numbers."""

    rival = _RIVAL

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        generator = torch.Generator().manual_seed(0)
        q = _numbers(problem, problem.heads, problem.q_len, generator)
        k, v = (_numbers(problem, problem.kv_heads, problem.kv_len, generator) for _ in range(2))
        self._native = _step(_NATIVE, problem, q, k, v)
        self._theirs = _step(_RIVAL, problem, q, k, v)
        pairs = zip(self._native(), self._theirs(), strict=True)
        apart = (float((a.float() - b.float()).abs().max()) for a, b in pairs)
        self.error, self.tolerance = max(apart), _TOLERANCES[problem.dtype]

    def native(self) -> object:
        """Run the native kernel once."""
        return self._native()

    def theirs(self) -> object:
        """Run torch's kernel once."""
        return self._theirs()


def _numbers(problem: Problem, heads: int, length: int, generator: torch.Generator) -> Tensor:
    """Return an array of random numbers, which repeat: to draw all would take longer than a try."""
    shape = (1, heads, length, problem.head_dim)
    drawn = torch.randn(_DRAWN, generator=generator, device="cpu", dtype=torch.float32)
    drawn = drawn.to(getattr(torch, problem.dtype))
    count = math.prod(shape)
    made = drawn.repeat(-(-count // _DRAWN))[:count].view(shape)
    return made.requires_grad_(problem.grad)


_DRAWN = 8191  # a prime, so that no two rows are alike


def _step(
    backend: str, problem: Problem, q: Tensor, k: Tensor, v: Tensor
) -> Callable[[], tuple[Any, ...]]:
    """Return what runs a backend's kernel, with the backward pass where the problem trains."""
    kernel = kernel_of(Selection(backend, Source.HEURISTIC), problem)
    mask = None if problem.mask is None else Causal("top_left")

    def forward() -> tuple[Any, ...]:
        return (kernel(q, k, v, mask, None, None),)

    def both() -> tuple[Any, ...]:
        with torch.enable_grad():
            (out,) = forward()
            return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    return both if problem.grad else forward
