"""Who may take part in a measurement: prepared, warmed up and checked within bounded time."""

from __future__ import annotations

import gc
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from polyattn.measure.inputs import Inputs
from polyattn.measure.timing import once
from polyattn.measure.verify import Check, Truth
from polyattn.problem import Problem
from polyattn.selection import Accepted, Selection, Source
from polyattn.selection.prepare import kernel_of
from polyattn.selection.registry import registry
from polyattn.selection.select import decision_on

__all__ = ["Candidate", "TimeLimitExceeded", "candidates", "ready", "time_limit"]


HOPELESS = 20.0
AGAIN_S = 0.01
"""How long a time limit that rang during an import waits before it rings again."""
INTERRUPT_AGAIN_S = 5.0
"""How long a Ctrl-C waits before it is raised again."""


class TimeLimitExceeded(BaseException):
    """Preparing took too long; no ``except Exception`` of a compiler may swallow it."""


@dataclass
class Candidate:
    """A backend in one configuration, and what became of it.

    `status`: ``ok`` (right, and worth timing), ``wrong``, ``failed``, ``too slow`` or
    ``too large``; `note` says more. `forward` and `step` are set when it is ok.
    """

    backend: str
    config: Mapping[str, Any]
    status: str = "ok"
    note: str = ""
    check: Check = field(default_factory=lambda: Check(math.inf, 0.0, False))
    prepare_s: float = 0.0
    first_s: float = 0.0
    forward: Callable[[], object] = field(default=lambda: None, repr=False)
    step: Callable[[], object] = field(default=lambda: None, repr=False)

    @property
    def label(self) -> str:
        """Backend and configuration, as one name."""
        config = json.dumps(dict(self.config), sort_keys=True) if self.config else ""
        return f"{self.backend} {config}".strip()


def candidates(problem: Problem) -> list[Candidate]:
    """Return every exact backend that accepts the problem here, in all its configurations."""
    found = []
    for backend in registry.backends(problem.framework):
        if backend.capabilities_for(problem.device).exactness != "exact":
            continue  # never chosen automatically, so its time decides nothing
        if isinstance(decision_on(backend, problem, registry), Accepted):
            configs = registry.configurations(backend, problem)
            distinct = {json.dumps(c, sort_keys=True): c for c in configs}
            found += [Candidate(backend.name, config) for config in distinct.values()]
    return found


def ready(
    candidate: Candidate,
    inputs: Inputs,
    truth: Truth,
    *,
    limit_s: float,
    call_limit_s: float,
    fastest_s: float = math.inf,
) -> Candidate:
    """Prepare, warm up and check a candidate; its status says what came of it.

    `fastest_s`: a call of the fastest candidate so far; who needs :data:`HOPELESS` times that is
    not timed any further.
    """
    if inputs.problem.dropout_p and not candidate.config:
        candidate.note = "checked without dropout"
    begin = time.perf_counter()
    try:
        with time_limit(limit_s):
            _prepare(candidate, inputs, truth)
            candidate.prepare_s = time.perf_counter() - begin
            if candidate.status == "ok":
                _warm_up(candidate, inputs.problem, fastest_s)
    except TimeLimitExceeded:
        candidate.status = "too slow"
        candidate.note = f"not ready within {limit_s:g} s (compiling, checking, first calls)"
    except MemoryError as error:
        candidate.status, candidate.note = "too large", _short(error)
    except Exception as error:  # a kernel's fault is a finding about the kernel
        candidate.status, candidate.note = "failed", _short(error)
    if candidate.status == "ok" and candidate.first_s > call_limit_s:
        candidate.status = "too slow"
        candidate.note = f"one call takes {candidate.first_s:.2f} s"
    gc.collect()
    return candidate


def _warm_up(candidate: Candidate, problem: Problem, fastest_s: float) -> None:
    def wait() -> None:
        synchronise(problem)

    candidate.first_s = once(candidate.step, wait)
    if candidate.first_s > HOPELESS * fastest_s:  # a first call may be slow for other reasons
        candidate.first_s = min(candidate.first_s, once(candidate.step, wait))
    if candidate.first_s > HOPELESS * fastest_s:
        candidate.status = "too slow"
        candidate.note = f"one call takes {candidate.first_s / fastest_s:.0f} times the fastest's"
    else:
        candidate.first_s = min(candidate.first_s, once(candidate.step, wait))


def _prepare(candidate: Candidate, inputs: Inputs, truth: Truth) -> None:
    problem = inputs.problem
    if (size := _scores_bytes(candidate.backend, problem)) > _spare_bytes():
        candidate.status = "too large"
        candidate.note = f"its scores would take about {size / 2**30:.1f} GiB"
        return
    exact = problem.with_(dropout_p=0.0)
    if problem.framework == "jax":
        got = _jax_run(candidate, inputs, exact).results(truth.grad_out)
    else:
        got = _results(_forward(candidate, inputs, exact), inputs, truth.grad_out)
    candidate.check = truth.check(got)
    if not candidate.check.verified:
        candidate.status, candidate.note = "wrong", candidate.check.message
        return
    if problem.framework == "jax":
        run = _jax_run(candidate, inputs, problem)
        candidate.forward = run.forward
        candidate.step = run.stepper() if inputs.trains else run.forward
        return
    candidate.forward = forward = _forward(candidate, inputs, problem)
    candidate.step = forward
    if inputs.trains:
        leaves = list(inputs.leaves.values())

        def step() -> None:
            out = forward()
            out = out[0] if isinstance(out, tuple) else out
            torch.autograd.grad(out, leaves, inputs.grad_out, allow_unused=True)

        candidate.step = step


def _kernel(candidate: Candidate, problem: Problem) -> Callable[..., Any]:
    chosen = Selection(candidate.backend, Source.TUNED, candidate.config, problem=problem)
    return kernel_of(chosen, problem)


def _jax_run(candidate: Candidate, inputs: Inputs, problem: Problem) -> Any:
    from polyattn.measure.jax_runs import JaxRun

    return JaxRun(_kernel(candidate, problem), replace(inputs, problem=problem))


def _forward(candidate: Candidate, inputs: Inputs, problem: Problem) -> Callable[[], Any]:
    kernel = _kernel(candidate, problem)
    q, k, v, mask, bias, sinks = (
        inputs.q, inputs.k, inputs.v, inputs.mask, inputs.bias, inputs.sinks,
    )  # fmt: skip

    def forward() -> Any:
        with torch.set_grad_enabled(inputs.trains):
            return kernel(q, k, v, mask, bias, sinks)

    return forward


def _results(forward: Callable[[], Any], inputs: Inputs, grad_out: Tensor) -> dict[str, Tensor]:
    given = forward()
    out, lse = given if isinstance(given, tuple) else (given, None)
    found = {"out": out}
    if lse is not None:
        found["lse"] = lse
    leaves = inputs.leaves
    if leaves:
        grads = torch.autograd.grad(out, list(leaves.values()), grad_out, allow_unused=True)
        found |= {
            name: torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
        }
    return {name: x.detach() for name, x in found.items()}


def synchronise(problem: Problem) -> None:
    """Wait for the device, where it works on its own."""
    if problem.device == "cuda":
        torch.cuda.synchronize()


def _scores_bytes(backend: str, p: Problem) -> int:
    """Estimate what backends that write the scores down need; others need next to nothing."""
    exact = backend in ("reference", "jax_reference")
    if not exact and backend not in ("sdpa_math", "jax_xla"):
        return 0
    scores = (p.batch if p.layout != "packed" else 1) * p.heads * p.q_len * p.kv_len
    return scores * (8 if exact else 4) * (10 if p.grad else 6)


def _spare_bytes() -> float:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            line = next(x for x in lines if x.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024 * 0.5
    except (OSError, StopIteration, ValueError):
        return math.inf


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`TimeLimitExceeded` after `seconds`, where signals allow it (main thread).

    An import under way is let end first: a half imported module (the compiler's, on its first use)
    would fail in the whole rest of the process. A Ctrl-C that what runs within has swallowed, as
    compilers do in their callbacks, is raised again.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(
        signal, "setitimer"
    ):
        yield
        return

    bell = _Bell(_imports_under_way(sys._getframe()))
    interrupts = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGALRM, bell.ring)
    if interrupts is signal.default_int_handler:  # a program's own handler stays
        signal.signal(signal.SIGINT, bell.interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if interrupts is signal.default_int_handler:
            signal.signal(signal.SIGINT, interrupts)
        if bell.interrupted:
            raise KeyboardInterrupt


class _Bell:
    """Answers the alarm and Ctrl-C within a time limit."""

    def __init__(self, around: int) -> None:
        self._around = around
        self.interrupted = False

    def ring(self, number: int, frame: FrameType | None) -> None:
        """Answer the alarm."""
        if self.interrupted:
            raise KeyboardInterrupt
        if _imports_under_way(frame) > self._around:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            raise TimeLimitExceeded

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Answer Ctrl-C, and have the alarm ask again where nobody ends."""
        self.interrupted = True
        signal.setitimer(signal.ITIMER_REAL, INTERRUPT_AGAIN_S, INTERRUPT_AGAIN_S)
        raise KeyboardInterrupt


def _imports_under_way(frame: FrameType | None) -> int:
    """Return how many calls of the import system the frame runs in."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return count


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
