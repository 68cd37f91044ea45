"""A verdict on one backend and one case: accepted and right, or which of the two lies it told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyattn.conformance.cases import Case
from polyattn.conformance.inputs import Inputs, build
from polyattn.conformance.jax_calls import jax_call, jax_kernel, jax_special, problem_for
from polyattn.conformance.oracle import Answer, allowed, naive
from polyattn.conformance.poison import Flags, hidden, spread
from polyattn.conformance.tolerance import Yardstick, measure
from polyattn.errors import InvalidProblem, Unsupported
from polyattn.problem import Problem
from polyattn.selection.capabilities import Capabilities, Reason
from polyattn.selection.registry import Backend
from polyattn.torch import attention, quantized_attention
from polyattn.torch.admission import Call, admit
from polyattn.torch.quantized import QuantizedWay

__all__ = ["Outcome", "Subject", "Verdict", "examine", "subject"]

Run = Callable[[Inputs], Any]
_POISONS = {float("nan"): "NaN", float("inf"): "huge"}
_NOT_ASKED = frozenset({"device", "compute capability", "determinism", "torch.compile"})

_NOT_ASKED_OF_DEVICES = frozenset({"head dim", "value dim"})
"""What may end all use of a device: kernels read whole vectors there (torch's memory-efficient one,
on an H100, with a head dim that is no multiple of 8)."""


@dataclass(frozen=True)
class Verdict:
    """What came of one backend and one case.

    `outcome`: ``right``, ``wrong``, ``false_acceptance`` (it raised), ``refused``, or
    ``refused_alone``: refused for one reason only, and the kernel was run anyway; then `able`
    says whether it came out right, and `fact` what the reason was about.
    """

    outcome: str
    detail: str = ""
    fact: str = ""
    able: bool = False

    @property
    def fails(self) -> bool:
        """Whether this verdict alone is a failure; refusals are judged over a whole run."""
        return self.outcome in ("wrong", "false_acceptance")


@dataclass(frozen=True)
class Subject:
    """A case built once for all backends: its inputs, the call that was admitted, the truth."""

    case: Case
    inputs: Inputs
    call: Call
    seen: Tensor
    truth: Answer
    empty: Tensor
    baseline: Callable[[], Answer]


@dataclass(frozen=True)
class Outcome:
    """What one run gave: out, lse and gradients by name."""

    values: dict[str, Tensor]


class _Wrong(Exception):
    """The result of a kernel is not what it has to be."""


def subject(case: Case, device: str = "cpu") -> Subject:
    """Build a case and the truth about it."""
    inputs = build(case, device)
    call = _admitted(inputs)
    seen = allowed(case, inputs.mask)
    kept: list[Answer] = []

    def baseline() -> Answer:
        if not kept:
            wide = torch.float64 if case.dtype == "float64" else torch.float32
            kept.append(naive(inputs, seen, wide))
        return kept[0]

    return Subject(case, inputs, call, seen, naive(inputs, seen), ~seen.any(-1), baseline)


def _admitted(inputs: Inputs) -> Call:
    if inputs.quantised is None:
        return admit(inputs.q, inputs.k, inputs.v, **inputs.options)
    return QuantizedWay(*inputs.quantised, inputs.options).admit(inputs.q, inputs.k, inputs.v)


def examine(subject: Subject, backend: Backend, compiled: bool = False) -> Verdict:
    """Ask the backend; run what it accepts, and what it refuses for one reason only.

    `compiled`: what it accepts runs inside ``torch.compile(fullgraph=True)``; refusals are taken as
    they are, since the kernels behind them are those of eager calls. What NaN may spread to is
    held to what the backend declares of compiled code.
    """
    if backend.framework == "jax":
        return _examine_in_jax(subject, backend)
    problem = subject.call.problem.with_(compiled=compiled)
    reasons = backend.check(problem)
    if reasons and compiled:
        return Verdict("refused", "; ".join(map(str, reasons)))
    if compiled and problem.quantized is not None:
        return Verdict("refused", "calls on quantised keys are eager")
    if reasons:
        return _refusal(subject, backend, reasons)

    def call(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
        return attention(q, k, v, **options, backend=backend.name)

    if compiled:
        torch.compiler.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")

    def run(inputs: Inputs) -> Any:
        if inputs.quantised is not None:
            return _on_codes(inputs, backend.name)
        return call(inputs.q, inputs.k, inputs.v, inputs.options)

    promised = backend.capabilities_for(problem.device)
    return _verdict(subject, run, promised, promised.isolates_compiled or not compiled)


def _verdict(
    subject: Subject, run: Run, promised: Capabilities, isolates_rows: bool = True
) -> Verdict:
    repeats = (promised.deterministic, promised.deterministic_backward)
    try:
        _judge(subject, run, repeats, isolates_rows)
    except _Wrong as fault:
        return Verdict("wrong", str(fault))
    except Exception as error:  # whatever a kernel raises is the finding
        return Verdict("false_acceptance", f"{type(error).__name__}: {error}")
    return Verdict("right")


def _examine_in_jax(subject: Subject, backend: Backend) -> Verdict:
    """Ask a backend of JAX; what runs is the same case, by JAX."""
    problem = problem_for(subject.call.problem)
    reasons = backend.check(problem)
    if problem.quantized is not None:
        return Verdict("refused", "; ".join(map(str, reasons)))
    if reasons and (special := _special(subject, backend, problem)) is not None:
        return special
    if reasons:
        return _refusal(subject, backend, reasons)
    run = jax_call(subject.case, backend)
    return _verdict(subject, run, backend.capabilities_for(problem.device))


def _special(subject: Subject, backend: Backend, problem: Problem) -> Verdict | None:
    """Examine a backend for spread sequences or pages on the case as one; None for others."""
    try:
        run = jax_special(subject.case, backend)
        if run is None:
            return None
        outcome(subject.inputs, run)
    except (InvalidProblem, Unsupported) as error:
        return Verdict("refused", str(error).splitlines()[0])
    except Exception as error:
        return Verdict("false_acceptance", f"{type(error).__name__}: {error}")
    return _verdict(subject, run, backend.capabilities_for(problem.device))


def _on_codes(inputs: Inputs, backend: str) -> Any:
    assert inputs.quantised is not None
    key_scales, value_scales, block_size = inputs.quantised
    return quantized_attention(
        inputs.q, inputs.k, inputs.v, key_scales, value_scales, block_size=block_size,
        **inputs.options, backend=backend,
    )  # fmt: skip


def _refusal(subject: Subject, backend: Backend, reasons: tuple[Reason, ...]) -> Verdict:
    """Run a kernel on what it refuses for a single reason, to see whether it really cannot."""
    problem, call = subject.call.problem, subject.call
    reason = reasons[0]
    said = "; ".join(map(str, reasons))
    not_asked = _NOT_ASKED if problem.device == "cpu" else _NOT_ASKED | _NOT_ASKED_OF_DEVICES
    if len(reasons) > 1 or reason.fact in not_asked or problem.empty:
        return Verdict("refused", said)

    def run(inputs: Inputs) -> Any:
        if backend.framework == "jax":
            return jax_kernel(subject.case, backend, problem)(inputs)
        kernel = backend.load()(problem, {})
        extra = () if inputs.quantised is None else (inputs.quantised,)
        return kernel(inputs.q, inputs.k, inputs.v, call.mask, inputs.bias, inputs.sinks, *extra)

    try:
        _judge(subject, run, (True, True))
    except Exception as error:  # it could not: the refusal is justified
        return Verdict("refused_alone", f"{said}; run anyway: {error}", _about(reason))
    return Verdict("refused_alone", f"{said}; run anyway it is right", _about(reason), able=True)


def _about(reason: Reason) -> str:
    """Name what a reason is about, finely enough that its cases can stand for each other."""
    if reason.fact in ("dtype", "layout"):
        return f"{reason.fact} {reason.got}"
    if reason.fact == "bias":
        return f"bias {reason.got.partition('(')[0]}"
    return f"{reason.fact} ({reason.takes})" if reason.fact == "mask" else reason.fact


def _judge(
    subject: Subject, run: Run, repeats: tuple[bool, bool], isolates_rows: bool = True
) -> None:
    """Raise unless a run is right, leaves its inputs alone, repeats itself, and leaks nothing."""
    case, inputs = subject.case, subject.inputs
    before = {name: x.detach().clone() for name, x in _arrays(inputs).items()}
    first = outcome(inputs, run)
    for name, x in _arrays(inputs).items():
        if not torch.equal(_bits(x), _bits(before[name])):
            raise _Wrong(f"the {name} that was handed in was modified")
    _compare(subject, first)
    forward, backward = repeats
    if forward:
        again = outcome(inputs, run)
        for name in first.values:
            fixed = name in ("out", "lse") or backward
            if fixed and not torch.equal(first.values[name], again.values[name]):
                raise _Wrong(f"{name} differs when the same call is made twice")
    if case.poison and not subject.call.problem.empty:
        for poison in _POISONS:
            _poison_hidden(subject, run, first, forward, poison)
            if inputs.q.device.type == "cpu" and forward and isolates_rows:
                _poison_spread(subject, run, first, poison)


def _arrays(inputs: Inputs) -> dict[str, Tensor]:
    every = {"query": inputs.q, "key": inputs.k, "value": inputs.v, "sinks": inputs.sinks}
    every["bias"] = None if inputs.bias is None else inputs.bias.payload
    if inputs.quantised is not None:
        every["key_scales"], every["value_scales"], _ = inputs.quantised
    return {name: x for name, x in every.items() if x is not None}


def _bits(x: Tensor) -> Tensor:
    """Return what torch.equal compares: it knows no floats of 8 bits."""
    return x.detach().view(torch.uint8) if x.element_size() == 1 else x.detach()


def outcome(inputs: Inputs, run: Run, backward: bool = True) -> Outcome:
    """Run forward, and backward where gradients are wanted."""
    given = run(inputs)
    out, lse = given if inputs.case.lse else (given, None)
    if not isinstance(out, Tensor) or (inputs.case.lse and not isinstance(lse, Tensor)):
        raise _Wrong(f"the kernel gave {type(given).__name__}")
    if out.dtype != inputs.q.dtype or out.device != inputs.q.device:
        raise _Wrong(f"out is {out.dtype} on {out.device}")
    values = {"out": out.detach()}
    results, incoming = [out], [inputs.grad_out]
    if lse is not None:
        if lse.dtype != inputs.grad_lse.dtype:
            raise _Wrong(f"lse is {lse.dtype}, expected {inputs.grad_lse.dtype}")
        values["lse"] = lse.detach()
        results, incoming = [out, lse], [inputs.grad_out, inputs.grad_lse]
    leaves = inputs.leaves
    if leaves and backward:
        if any(x.shape != g.shape for x, g in zip(results, incoming, strict=True)):
            raise _Wrong(f"shapes {[tuple(x.shape) for x in results]}")
        values |= _gradients(leaves, results, incoming)
    return Outcome(values)


def _gradients(
    leaves: dict[str, Tensor], results: list[Tensor], incoming: list[Tensor]
) -> dict[str, Tensor]:
    """Return the gradient of each leaf; where one has none, or is not even asked, it is wrong."""
    pairs = [(x, g) for x, g in zip(results, incoming, strict=True) if x.requires_grad]
    if not pairs:
        raise _Wrong("no result requires a gradient, though inputs do")
    heads, tails = zip(*pairs, strict=True)
    grads = torch.autograd.grad(heads, list(leaves.values()), tails, allow_unused=True)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        if grad is None:
            raise _Wrong(f"the gradient of {name} is None")
        if grad.dtype != leaf.dtype:
            raise _Wrong(f"the gradient of {name} is {grad.dtype}")
    return dict(zip(leaves, grads, strict=True))


def _compare(subject: Subject, got: Outcome) -> None:
    truth, case = subject.truth, subject.case
    terms = max(case.t, case.s, case.h, case.v) * (case.n // case.k)
    for name, exact in truth.values.items():
        half = name == "lse" and subject.case.dtype in ("float16", "bfloat16")
        baseline = _one(subject.baseline, name)
        beyond = truth.beyond.get(name)
        yardstick = Yardstick(
            name, exact, truth.scale[name], truth.score, baseline, terms, half, beyond
        )
        fault = measure(got.values[name], yardstick)
        if fault is not None:
            raise _Wrong(str(fault))
    empty = subject.empty.to(got.values["out"].device)
    if bool(empty.any()) and bool((_rows(subject, got.values["out"])[empty] != 0).any()):
        raise _Wrong("a query that sees no key has an output that is not 0")


def _one(baseline: Callable[[], Answer], name: str) -> Callable[[], Tensor]:
    return lambda: baseline().values[name]


def _rows(subject: Subject, x: Tensor) -> Tensor:
    """Return an output as (B, N, T, V)."""
    if subject.case.packed:
        return x[None].transpose(1, 2)
    return x if subject.case.layout == "BNTH" else x.transpose(1, 2)


def _poison_hidden(
    subject: Subject, run: Run, clean: Outcome, bitwise: bool, poison: float
) -> None:
    """Poison what is hidden from everyone: outputs the same bits, gradients still right."""
    bad = hidden(subject.case, subject.seen)
    if not any(bool(flags.any()) for flags in bad):
        return
    struck = outcome(subject.inputs.poisoned(*bad, poison), run)
    for name in ("out", "lse"):
        if name not in clean.values or torch.equal(struck.values[name], clean.values[name]):
            continue
        if bitwise or not bool(struck.values[name].isfinite().all()):
            what = _POISONS[poison]
            raise _Wrong(
                f"{name} changes when masked entries are {what}{_how(struck, clean, name)}"
            )
    _compare(subject, struck)
    for name, flags in zip(("query", "key", "value"), bad, strict=True):
        if name in struck.values and bool(
            (
                struck.values[name][
                    flags.to(struck.values[name].device).expand_as(struck.values[name])
                ]
                != 0
            ).any()
        ):
            raise _Wrong(f"the gradient of a masked {name} is not 0")


def _how(struck: Outcome, clean: Outcome, name: str) -> str:
    a, b = struck.values[name], clean.values[name]
    at = (a != b).nonzero()[0].tolist()
    return f": {at} is {float(a[tuple(at)])}, was {float(b[tuple(at)])}"


def _poison_spread(subject: Subject, run: Run, clean: Outcome, poison: float) -> None:
    """Poison one key that some attend: rows that do not attend it keep their bits."""
    bad, untouched = spread(subject.case, subject.seen)
    if bad is None or not bool(untouched.any()):
        return
    struck = outcome(subject.inputs.poisoned(*bad, poison), run, backward=False)
    for name in ("out", "lse"):
        if name not in clean.values:
            continue
        a, b = (x.values[name] for x in (struck, clean))
        if name == "out":
            a, b = _rows(subject, a)[untouched], _rows(subject, b)[untouched]
        else:
            a, b = (x.reshape(untouched.shape)[untouched] for x in (a, b))
        if not torch.equal(a, b):
            what = _POISONS[poison]
            raise _Wrong(f"{name} of a query changes when a key that it does not attend is {what}")
    _gradients_beside(subject, run, clean, (bad, untouched), poison)


def _gradients_beside(
    subject: Subject, run: Run, clean: Outcome, where: tuple[Flags, Tensor], poison: float
) -> None:
    """See that the gradient of a query that does not attend a NaN key is what it was.

    A huge value is left out: times the gradient that comes in it overflows, and then meets the 0
    of its probability.
    """
    bad, untouched = where
    if "query" not in clean.values or poison == poison or subject.case.strides[0] == "e":
        return
    struck = outcome(subject.inputs.poisoned(*bad, poison), run)
    a, b = (_rows(subject, x.values["query"])[untouched] for x in (struck, clean))
    room = 64 * torch.finfo(a.dtype).eps * float(b.abs().max()) if b.numel() else 0.0
    if not bool(((a - b).abs() <= room).all()):
        raise _Wrong("the gradient of a query changes when a key that it does not attend is NaN")
