"""One line for a port's own tests: that it computes, module by module, what the reference does."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from polyattn.errors import PolyattnError, TraceError
from polyattn.trace.compare import Floor, Verdict, compare
from polyattn.trace.compare.rules import Given
from polyattn.trace.compare.thresholds import Tolerance
from polyattn.trace.recorders.torch.model_trace import trace
from polyattn.trace.recorders.torch.same_conditions import (
    Inputs,
    SameConditions,
    refuse_what_cannot_run,
)
from polyattn.trace.recorders.torch.tensor_paths import leaves
from polyattn.trace.recorders.torch.what_to_record import Layers

__all__ = ["assert_same_activations"]

logger = logging.getLogger("polyattn.trace")

_ISOLATED = (
    "each module was fed the reference's inputs: running freely, rounding and a fault looked alike"
)

Isolate = Literal["auto"] | bool
Gradients = bool | Callable[[Any], Tensor]


def assert_same_activations(
    reference: nn.Module,
    port: nn.Module,
    inputs: Inputs,
    *,
    rules: Given = None,
    tolerance: Tolerance = None,
    floor: Floor | str | Path | None = None,
    layers: Layers = None,
    isolate: Isolate = "auto",
    gradients: Gradients = False,
    folder: str | Path | None = None,
) -> Verdict:
    """Run both models on the same inputs and fail if a module of the port is wrong, with its name.

    `inputs`: a tensor, a tuple of positional arguments, a dict of keyword arguments, or a function
    that takes a model and runs it. Each model gets copies, on its device and in its dtype, and the
    same random numbers, which are put back afterwards; no gradients are computed.

    `rules`, `tolerance`, `floor` are those of :func:`polyattn.trace.compare.compare`; `layers`
    those of :func:`polyattn.hooks.trace`, for both. `gradients`: compare those too, of the function
    of the output that is given, or of a fixed random mean of its first tensor; no ``.grad``
    changes. `isolate`: feed each module of the port the reference's inputs, always or, with
    "auto", where running freely cannot tell, as in bfloat16. `folder`: where the traces are kept if
    it fails; else nothing is kept.

    Returns the verdict, which is "same". Raises AssertionError for "different" and for "cannot
    say"; its attribute ``verdict`` has the verdict. Raises TraceError for a model in training mode
    with active dropout, or with weights on the meta device; what a model raises goes on. No hook
    stays on a model.

    >>> reference = nn.Sequential(nn.Linear(4, 4), nn.GELU()).eval()
    >>> port = nn.Sequential(reference[0], nn.GELU(approximate="tanh")).eval()
    >>> x = torch.linspace(-2, 2, 8).view(2, 4)
    >>> assert_same_activations(reference, reference, x).equal
    True
    >>> assert_same_activations(reference, port, x)
    Traceback (most recent call last):
      ...
    AssertionError: different: the output of '1'; its inputs agree
    ...
    """
    __tracebackhide__ = True
    if isolate not in ("auto", True, False):
        raise TraceError(f"got isolate={isolate!r}, expected 'auto', True or False.")
    refuse_what_cannot_run(reference, "the reference")
    refuse_what_cannot_run(port, "the port")
    with SameConditions(inputs, (reference, port)) as conditions, _temporary() as made:
        check = _Check(reference, port, conditions, layers, gradients, made)
        verdict = check.verdict(isolate, rules=rules, tolerance=tolerance, floor=floor)
        if verdict.equal:
            return replace(verdict, reference="", port="")  # they are gone in a moment
        raise _failed(verdict, [*check.notes()], made, folder)


class _Check:
    """Both models, run and compared, with files in a folder of its own."""

    def __init__(
        self,
        reference: nn.Module,
        port: nn.Module,
        conditions: SameConditions,
        layers: Layers,
        gradients: Gradients,
        folder: Path,
    ) -> None:
        self._models = {"reference": reference, "port": port}
        self._conditions, self._layers, self._gradients = conditions, layers, gradients
        self._folder = folder

    def verdict(self, isolate: Isolate, **how: Any) -> Verdict:
        """Run, compare, and where that cannot tell and it may, isolate."""
        __tracebackhide__ = True
        if isolate is True:
            return self._isolated(how, "each module was fed the reference's inputs")
        one, other = self._recorded("reference"), self._recorded("port")
        found = compare(one, other, **how)
        if found.equal is False and found.culprit is not None and found.culprit.phase != "param":
            found = self._if_they_repeat(found, one, other, how)
        chosen = _may_be_chosen_by_rounding(found)
        if isolate is False or not (chosen or _isolating_may_tell(found)):
            return found
        try:
            alone = self._isolated(how, _ISOLATED)
        except PolyattnError as error:
            return _noted(found, f"isolating the modules was not possible: {error}")
        if chosen and alone.equal is None:
            return found
        if alone.equal and self._gradients is not False:
            return _noted(found, "isolated, all outputs agree; gradients cannot be isolated")
        return alone

    def _recorded(self, name: str, again: str = "") -> Path:
        __tracebackhide__ = True
        model = self._models[name]
        path = self._folder / f"{name}{again}.jsonl"
        if self._gradients is False:
            with torch.no_grad(), trace(model, path, layers=self._layers) as run:
                self._conditions.call(model)
            return run.path
        run = trace(model, path, layers=self._layers, gradients=True)
        with run, torch.inference_mode(False), torch.enable_grad():
            self._backward(model, *self._conditions.call(model))
        return run.path

    def _backward(self, model: nn.Module, output: Any, inputs: list[Tensor]) -> None:
        """Have the gradients computed, and leave every ``.grad`` as it is."""
        __tracebackhide__ = True
        loss = self._gradients(output) if callable(self._gradients) else _mean(output)
        wanted = [*inputs, *(p for p in model.parameters() if p.requires_grad)]
        if not isinstance(loss, Tensor) or not loss.requires_grad or not wanted:
            raise TraceError(
                "got gradients to compare and nothing of them depends on a weight or an input that "
                "requires a gradient: call .requires_grad_() on the models, or leave gradients out."
            )
        torch.autograd.grad(loss, wanted, allow_unused=True)

    def _if_they_repeat(self, found: Verdict, one: Path, other: Path, how: Any) -> Verdict:
        """Blame no module for what differs from run to run: each model runs once more."""
        try:
            again = {
                "a": self._recorded("reference", "-again"),
                "b": self._recorded("port", "-again"),
            }
        except Exception as error:
            logger.warning("whether the models repeat themselves is not known: %s", error)
            return found
        return compare(one, other, reruns=again, **how)

    def _isolated(self, how: dict[str, Any], note: str) -> Verdict:
        __tracebackhide__ = True
        from polyattn.trace.isolate import isolate

        def run(model: nn.Module) -> Any:
            return self._conditions.call(model)[0]

        found = isolate(
            self._models["port"],
            self._models["reference"],
            run,
            rules=how["rules"],
            tolerance=how["tolerance"],
            layers=self._layers,
            path=self._folder / "isolated.jsonl",
        )
        free = self._folder / "reference.jsonl"
        return replace(_noted(found, note), reference=str(free) if free.exists() else "")

    def notes(self) -> Iterator[str]:
        """What may have to do with a failure."""
        if self._conditions.drew:
            yield (
                "the models drew random numbers, from the same state each; what draws in another "
                "order gets others"
            )
        modes = [model.training for model in self._models.values()]
        if modes[0] != modes[1]:
            which = "reference" if modes[0] else "port"
            yield f"the {which} is in training mode, the other one is not"


def _mean(output: Any) -> Tensor | None:
    """A mean of the output's first tensor with fixed random weights.

    A plain one is the same whatever the input is where a normalisation comes last.
    """
    floating = (t for _, t in leaves(output, "out") if t.is_floating_point())
    first = next(floating, None)
    if first is None:
        return None
    fixed = torch.Generator("cpu").manual_seed(0)
    weights = torch.randn(first.shape, generator=fixed, device="cpu")
    return (first * weights.to(first.device, first.dtype)).mean()


def _noted(verdict: Verdict, note: str) -> Verdict:
    return replace(verdict, notes=(note, *verdict.notes))


def _isolating_may_tell(verdict: Verdict) -> bool:
    """Whether it is rounding that keeps a verdict open, and no other condition."""
    held = all(verdict.guards[name].holds is not False for name in ("inputs", "determinism"))
    other = any(reason != verdict.guards["outputs"].said for reason in verdict.reasons)
    return verdict.equal is None and held and other and verdict.coverage.compared > 0


def _may_be_chosen_by_rounding(verdict: Verdict) -> bool:
    """Whether what is blamed is a model's code between modules whose numbers were rounded before.

    Where it sorts or chooses by them, as a detector its best proposals, that need be no fault.
    """
    culprit = verdict.culprit
    if culprit is None or culprit.kind != "input" or culprit.phase != "in":
        return False
    before = (row for row in verdict.rows if row.verdict == "same" and row.phase == "forward")
    return any(row.error_out for row in before)


@contextmanager
def _temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="polyattn-", ignore_cleanup_errors=True) as made:
        yield Path(made)


def _failed(
    verdict: Verdict, notes: list[str], made: Path, folder: str | Path | None
) -> AssertionError:
    """The error that says the verdict, after the traces were kept as asked."""
    kept = None
    if folder is None:
        notes.append("folder=... keeps the traces, for `polyattn trace diff` and `show`")
    else:
        try:
            kept = _kept(made, Path(folder))
            notes.append(f"the traces are in {kept}")
        except OSError as error:
            notes.append(f"the traces could not be kept in {folder}: {error}")

    def now(path: str) -> str:
        return str(kept / Path(path).name) if kept is not None and path else ""

    verdict = replace(
        verdict,
        notes=(*notes, *verdict.notes),
        reference=now(verdict.reference),
        port=now(verdict.port),
    )
    failed = AssertionError(str(verdict))
    failed.verdict = verdict  # type: ignore[attr-defined]
    return failed


def _kept(made: Path, folder: Path) -> Path:
    """Move the files to `folder`, or to a numbered one in it if it has those of another failure."""
    found, number = folder, 1
    while any(found.glob("*.jsonl")):
        number += 1
        found = folder / str(number)
    found.mkdir(parents=True, exist_ok=True)
    for one in made.iterdir():
        if "-again" not in one.name:
            shutil.move(one, found / one.name)
    return found
