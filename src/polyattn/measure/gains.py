"""What a program's attention takes as it ran, and what it would take with torch's own function.

Recorded calls are made again here, both ways by turns, after the result of the way that ran was
compared with the float64 reference. The most work first, until the time is used up.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from polyattn.errors import PolyattnError
from polyattn.integrations.program.asked import Case, Gain, Process, Ran
from polyattn.measure.candidates import TimeLimitExceeded, synchronise, time_limit
from polyattn.measure.inputs import Inputs, build
from polyattn.measure.stock_calls import Call, as_recorded, as_stock
from polyattn.measure.timing import once, time_interleaved
from polyattn.measure.tune import Progress
from polyattn.measure.verify import Truth
from polyattn.selection.requests import use_backend
from polyattn.torch.platform import device_description, library_versions

__all__ = ["gains_of", "machine"]

_ROUNDS = 5
_FEWEST_ROUNDS = 3


def gains_of(
    cases: list[Case], processes: list[Process], *, limit_s: float, progress: Progress | None = None
) -> Iterator[Gain]:
    """Yield a gain for each class of problems, those with the most work first.

    The case with the most calls stands for its class. After `limit_s` seconds no further one is
    begun, and the rest have a note instead of times.
    """
    report = progress or (lambda done, total, what: None)
    begin = time.perf_counter()
    order = _chosen(cases)
    for done, at in enumerate(order):
        case = cases[at]
        ran = _mostly(case)
        threads = processes[ran.process].threads if ran.process < len(processes) else None
        report(done, len(order), case.problem.shapes)
        left_s = limit_s - (time.perf_counter() - begin)
        if case.problem.empty:
            yield Gain(at, ran.backend, note="not measured: there is nothing to attend to")
        elif case.problem.compiled:
            yield Gain(at, ran.backend, note="not measured: of compiled calls no sizes are known")
        elif left_s <= 0:
            yield Gain(at, ran.backend, note=f"not measured: {limit_s:g} s were used up")
        else:
            yield _measured(at, case, ran, threads, left_s)
    report(len(order), len(order), "")


def _chosen(cases: list[Case]) -> list[int]:
    """Return the places of the cases that stand for their classes, the most work first."""
    work: Counter[str] = Counter()
    most: dict[str, int] = {}
    for at, case in enumerate(cases):
        one = case.problem_class
        work[one] += _work(case)
        if one not in most or case.calls > cases[most[one]].calls:
            most[one] = at
    return [most[one] for one, _ in work.most_common() if cases[most[one]].ran]


def machine() -> str:
    """Describe what times of here belong to."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return f"{device_description(device)}, {library_versions()}"


def _mostly(case: Case) -> Ran:
    """Return what most of the calls of a case ran on."""
    return case.ran.most_common(1)[0][0]


def _work(case: Case) -> int:
    """Estimate the work of all calls of a case, to begin with what matters."""
    p = case.problem
    once = p.batch * p.heads * p.q_len * p.kv_len * (p.head_dim + p.value_dim)
    return case.calls * once * (4 if p.grad else 1)


def _measured(at: int, case: Case, ran: Ran, threads: int | None, left_s: float) -> Gain:
    try:
        with _threads(threads), use_backend(ran.backend), time_limit(max(left_s, 1.0)):
            return _timed(at, build(case), ran, left_s)
    except TimeLimitExceeded:
        note = f"not measured: it takes more than the {left_s:.0f} s that were left"
    except (PolyattnError, MemoryError) as error:
        note = f"not measured: {str(error).splitlines()[0] if str(error) else 'no memory'}"
    return Gain(at, ran.backend, note=note)


def _timed(at: int, inputs: Inputs, ran: Ran, left_s: float) -> Gain:
    problem = inputs.problem
    recorded, stock = as_recorded(inputs), as_stock(inputs)
    truth = Truth(inputs)
    check = truth.check(_results(recorded, inputs, truth.grad_out))
    if not check.verified:
        return Gain(at, ran.backend, note=f"WRONG: {check.message}")
    steps = {"recorded": _step(recorded, inputs), "stock": _step(stock, inputs)}

    def wait() -> None:
        synchronise(problem)

    single_s = sum(once(step, wait) for step in steps.values())  # which warms up, too
    rounds = _ROUNDS if 4 * _ROUNDS * single_s < left_s else _FEWEST_ROUNDS
    times = time_interleaved(steps, wait, rounds=rounds)
    return Gain(
        at,
        ran.backend,
        times["recorded"].seconds,
        times["stock"].seconds,
        torch.get_num_threads(),
        max(one.foreign for one in times.values()),
    )


def _results(call: Call, inputs: Inputs, grad_out: Tensor) -> dict[str, Tensor]:
    """Return output and gradients without dropout, by name."""
    with torch.set_grad_enabled(inputs.trains):
        out = call(0.0)
    found = {"out": out}
    leaves = inputs.leaves
    if leaves:
        grads = torch.autograd.grad(out, list(leaves.values()), grad_out, allow_unused=True)
        found |= {
            name: torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
        }
    return {name: x.detach() for name, x in found.items()}


def _step(call: Call, inputs: Inputs) -> Callable[[], object]:
    """Return the forward pass, with the backward pass where the program had one."""
    dropout_p = inputs.problem.dropout_p
    leaves = list(inputs.leaves.values())

    def step() -> None:
        with torch.set_grad_enabled(inputs.trains):
            out = call(dropout_p)
        if leaves:
            torch.autograd.grad(out, leaves, inputs.grad_out, allow_unused=True)

    return step


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Run with as many threads as the process had."""
    before = torch.get_num_threads()
    try:
        if count and count != before:
            torch.set_num_threads(count)
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
