"""Isolate: judge each module of a port alone, on what the reference gave its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from polyattn.torch.internals import unwrapped
from polyattn.trace.compare import Verdict, compare
from polyattn.trace.compare.noise import RERUNS, noise_of, worth_measuring
from polyattn.trace.compare.rules import Given
from polyattn.trace.compare.thresholds import Tolerance
from polyattn.trace.format.contents import Trace
from polyattn.trace.format.output import rank_path
from polyattn.trace.format.reader import read
from polyattn.trace.isolate.choosing import inside, within_budget
from polyattn.trace.isolate.feeding import Feed
from polyattn.trace.isolate.precision import widened
from polyattn.trace.isolate.replay import fed_run, feed_of, written
from polyattn.trace.isolate.rounding import ROUNDINGS
from polyattn.trace.recorders.torch.heading import rank_and_world
from polyattn.trace.recorders.torch.model_trace import trace
from polyattn.trace.recorders.torch.same_conditions import (
    Inputs,
    SameConditions,
    refuse_what_cannot_run,
)
from polyattn.trace.recorders.torch.what_to_record import Layers, choose_modules

__all__ = ["isolate"]

_BUDGET = 4 << 30


def isolate(
    port: nn.Module,
    reference: nn.Module | Trace | str | Path,
    inputs: Inputs,
    *,
    rules: Given = None,
    tolerance: Tolerance = None,
    upcast: torch.dtype | None = None,
    path: str | Path | None = None,
    layers: Layers = None,
    budget: int = _BUDGET,
) -> Verdict:
    """Run the port with every module fed what the reference's was, and say which differs by itself.

    No error is inherited, so that a fault is told from rounding in bfloat16 and float16 too. The
    port runs twice: as it is, to see which module is which, then with the reference's tensors put
    in the place of what each module is given and returns, once that is recorded.

    `reference`: a trace that kept tensors whole (``trace(..., tensors=".*")``), or the model, which
    is run here; then where all its tensors would take more than `budget` bytes of disk, the outer
    modules are judged first and those inside the culprit in a further run. `inputs`: a tensor, a
    tuple of positional arguments, a dict of keyword arguments, or a function that takes a model and
    runs it. `rules`, `tolerance`: as in :func:`polyattn.trace.compare.compare`. `upcast`: run the
    port's modules in torch.float32 or torch.float64: what then agrees was rounding of its own.
    `layers`: which of the port's modules are fed, named as in :func:`polyattn.hooks.trace`; all by
    default. `path`: where to keep the isolated trace. No gradients are computed; compiled code runs
    eagerly.

    Raises TraceError for a reference without whole tensors or with others' files, for a model with
    active dropout or without weights; what a model raises goes on. No hook stays on a model.

    >>> reference = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).bfloat16()
    >>> port = nn.Sequential(reference[0], nn.SiLU(), reference[2])
    >>> verdict = isolate(port, reference, torch.randn(8, 64, dtype=torch.bfloat16))
    >>> verdict.culprit.module
    '1'
    """
    refuse_what_cannot_run(port, "the port")
    models: tuple[nn.Module, ...] = (port,)
    if isinstance(reference, nn.Module):
        refuse_what_cannot_run(reference, "the reference")
        models = (reference, port)
    target = None if path is None else rank_path(path, *rank_and_world())
    with SameConditions(inputs, models) as conditions, _quietly() as scratch:
        run = _Isolation(port, conditions, scratch, rules, tolerance, upcast, layers)
        if isinstance(reference, nn.Module):
            verdict = run.beside(reference, target, budget)
        else:
            given = reference if isinstance(reference, Trace) else read(reference)
            verdict = run.against(given, target)
    return replace(verdict, port="" if target is None else str(target))


class _Isolation:
    """A port under the conditions of one comparison, with a folder for its traces."""

    def __init__(
        self,
        port: nn.Module,
        conditions: SameConditions,
        scratch: Path,
        rules: Given,
        tolerance: Tolerance,
        upcast: torch.dtype | None,
        layers: Layers,
    ) -> None:
        self._port = port = unwrapped(port)
        self._conditions, self._scratch, self._upcast = conditions, scratch, upcast
        self._rules, self._tolerance = rules, tolerance
        self._layers = None if layers is None else frozenset(choose_modules(port, layers))
        self._runs = 0
        self._free = self._recorded(port, None, weights=True)

    def against(self, reference: Trace, target: Path | None) -> Verdict:
        """Judge the port by a trace."""
        feed = feed_of(reference, self._free, self._rules, self._layers, self._upcast)
        fed = self._fed(feed)
        isolated = written(fed, feed, self._file("isolated.jsonl"), self._free)
        verdict = self._compared(reference, isolated)
        if worth_measuring(verdict):
            reruns = [self._fed(feed.perturbed(seed)) for seed in range(RERUNS)]
            feed.noise = noise_of(isolated, reruns, ROUNDINGS)
        if target is None and not feed.noise:
            return verdict
        at = self._file("measured.jsonl") if target is None else target
        return self._compared(reference, written(fed, feed, at, self._free))

    def _fed(self, feed: Feed) -> Trace:
        with widened(self._port, self._upcast):
            return fed_run(self._port, feed, self._folder(), self._conditions.call)

    def _compared(self, reference: Trace, isolated: Trace) -> Verdict:
        return compare(
            reference, isolated, rules=self._rules, tolerance=self._tolerance, isolated=True
        )

    def beside(self, reference: nn.Module, target: Path | None, budget: int) -> Verdict:
        """Judge the port by the model, from the outside to the inside where all is too much."""
        reference = unwrapped(reference)
        names = [name for name, _ in reference.named_modules()]
        chosen = within_budget(self._free, names, budget)
        while True:
            trace = self._recorded(reference, chosen)
            verdict = replace(self.against(trace, target), reference="")
            within = _deeper(verdict, trace, chosen, budget)
            if within is None:
                return verdict
            if target is not None:
                target.unlink()
            chosen = within

    def _recorded(
        self, model: nn.Module, tensors: list[str] | None, *, weights: bool = True
    ) -> Trace:
        with trace(model, self._file("run.jsonl"), tensors=tensors, weights=weights) as run:
            self._conditions.call(model)
        return read(run.path)

    def _folder(self) -> Path:
        self._runs += 1
        folder = self._scratch / str(self._runs)
        folder.mkdir()
        return folder

    def _file(self, name: str) -> Path:
        return self._folder() / name


def _deeper(verdict: Verdict, trace: Trace, chosen: list[str], budget: int) -> list[str] | None:
    """The modules to look at next, inside the culprit; None where all of them were."""
    culprit = verdict.culprit
    if culprit is None or culprit.kind == "parameter" or culprit.reference_module is None:
        return None
    names = {one for one in trace.header.modules if inside(one, culprit.reference_module)}
    if names <= set(chosen):
        return None
    within = within_budget(trace, names, budget)
    return within if not set(within) <= set(chosen) else None


@contextmanager
def _quietly() -> Iterator[Path]:
    """Without gradients and compiled code, with a folder that is gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="polyattn-isolate-") as made,
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
    ):
        yield Path(made)
