"""A trace of one model: attached when it is made, ended by ``close`` or as a context manager."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Container, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from polyattn.errors import TraceError
from polyattn.hooks.manager import HookHandle, ModuleHookManager
from polyattn.torch.internals import unwrapped
from polyattn.trace.format.output import rank_path
from polyattn.trace.format.sink import JsonlSink
from polyattn.trace.recorders.torch.full_tensors import TensorFolder
from polyattn.trace.recorders.torch.heading import header_of, rank_and_world, refuse_long_names
from polyattn.trace.recorders.torch.perturbation import Perturbation, perturbation_of
from polyattn.trace.recorders.torch.recorder import Recorder
from polyattn.trace.recorders.torch.trace_hook import TraceHook
from polyattn.trace.recorders.torch.what_to_record import (
    Layers,
    choose_modules,
    choose_statistics,
    choose_steps,
    described,
    settled,
)

if TYPE_CHECKING:
    from polyattn.trace.recorders.torch.parts_called_first import Earlier

__all__ = ["HOOK", "ActivationTrace", "trace"]

HOOK = "polyattn.trace"
"""The name of the hook on each module."""

logger = logging.getLogger("polyattn.trace")


def trace(model: nn.Module, path: str | Path, **options: Any) -> ActivationTrace:
    """Record a model's activations in a file until the end of the ``with`` block.

    The options are those of :class:`ActivationTrace`, which it returns.

    >>> import tempfile
    >>> from polyattn.trace import read
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    >>> path = Path(tempfile.mkdtemp(), "run.jsonl")
    >>> with trace(model, path) as run:
    ...     _ = model(torch.ones(2, 4))
    >>> [(r.module, r.phase, r.same) for r in read(path).records]
    [('', 'in', None), ('0', 'in', 0), ('0', 'out', None), ('1', 'in', 2), ('1', 'out', None),
     ('', 'out', 4)]
    """
    return ActivationTrace(model, path, **options)


class ActivationTrace:
    """Records the calls of a model's modules until it is closed; then the model is as before.

    `layers`: which modules: a regular expression searched for in their names, names, or a function
    of name and module; all by default, the model itself, ``""``, too. `stats`: names of statistics,
    or (name, function) pairs; all by default. `steps`: those of :func:`trace_step` to record, as
    numbers or ``"0,5"``, ``"0-3"``. `tensors`: the modules whose tensors are kept whole, named as
    in `layers` (recorded even if not among those). `gradients`, `parameters`: record these too.
    `inputs`: record what goes in. `overwrite`: replace a file. `weights`: put fingerprints of all
    weights into the header, one pass over the model. `immediate`: have nothing wait, so that also
    records of a device and whole tensors are written before the model goes on; slow, and for
    finding what kills a process. `perturb`: a seed; until the trace is closed every weight is
    multiplied by ``1 + eps * u``, u random in -1..1 and eps the spacing of its dtype, as
    ``polyattn trace calibrate`` needs it. `earlier`: what was recorded of parts of the model
    before, to begin with.

    `path` is where the trace is, with the rank in its name if there are several. Raises TraceError
    for options that mean nothing, a file that cannot be written, and a model that is traced
    already.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | Path,
        *,
        layers: Layers = None,
        stats: Iterable[Any] | None = None,
        steps: Any = None,
        tensors: Layers = None,
        gradients: bool = False,
        parameters: bool = False,
        inputs: bool = True,
        overwrite: bool = False,
        weights: bool = True,
        immediate: bool = False,
        perturb: int | Perturbation | None = None,
        earlier: Earlier | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TraceError(f"got a {type(model).__name__} to trace, expected a torch.nn.Module.")
        self.model = model = unwrapped(model)  # of torch.compile
        layers, tensors = settled(layers), settled(tensors)
        whole = {} if tensors is None else choose_modules(model, tensors, "tensors")
        chosen = choose_statistics(stats)
        self.steps = choose_steps(steps)
        found = _without_scripted(choose_modules(model, layers) | whole)
        _refuse_traced(model, found)
        refuse_long_names(model)
        rank, world = rank_and_world()
        selection = {
            "layers": described(layers), "stats": [*chosen.names, *(n for n, _ in chosen.custom)],
            "steps": None if self.steps is None else sorted(self.steps),
            "tensors": list(whole), "inputs": inputs, "gradients": gradients,
            "parameters": parameters, "modules": len(found),
        }  # fmt: skip
        perturbation, self._own = perturbation_of(perturb)
        self._handles: list[HookHandle] = []
        self._warning: str | None = None
        file = rank_path(path, rank, world)
        self.sink = JsonlSink(file, overwrite=overwrite, background=not immediate, last=self._end)
        self.path = self.sink.path
        try:
            folder = TensorFolder(self.path, overwrite=overwrite) if whole else None
            self.recorder = Recorder(
                self.sink, chosen, model=type(model).__name__, rank=rank, steps=self.steps,
                inputs=inputs, parameters=parameters, gradients=gradients, folder=folder,
                immediate=immediate,
            )  # fmt: skip
            if perturbation is not None:
                perturbation.apply(model)
                selection["perturb"] = perturbation.seed
            self.sink.write(header_of(model, selection, rank, world, weights).line())
            self._attach(found, whole, earlier)
        except BaseException:
            self._abandon()
            raise

    def _attach(
        self, modules: dict[str, nn.Module], whole: Container[str], earlier: Earlier | None
    ) -> None:
        if earlier is not None:
            earlier.write(self.recorder)
        for name, module in modules.items():
            after = None if earlier is None else earlier.hooks.get(name)
            hook = TraceHook(self.recorder, module, name, name in whole, after)
            self._handles.append(ModuleHookManager.of(module).attach(HOOK, hook))

    @property
    def attached(self) -> bool:
        """Whether the model is traced by this now."""
        return bool(self._handles)

    def detach(self) -> None:
        """Take the hooks off; the file stays open until ``close``."""
        handles, self._handles = self._handles, []
        for handle in reversed(handles):
            handle.detach()

    def flush(self) -> None:
        """Wait until what was recorded in calls that have ended is with the operating system."""
        self.recorder.finish()
        self.sink.flush()

    def close(self) -> None:
        """Take the hooks off and end the file; again does nothing.

        Warns if nothing was recorded because of `steps`. Raises TraceError if records were lost,
        as on a full disk. It is done at the interpreter's exit too, where problems are only logged.
        """
        self._close(3)

    def _close(self, stacklevel: int) -> None:
        self.detach()
        try:
            self.sink.close()
        finally:
            self._undo()
            warning, self._warning = self._warning, None
            if warning is not None:
                warnings.warn(warning, stacklevel=stacklevel)

    def _undo(self) -> None:
        """Give the model its weights back, if it was this that perturbed them."""
        own, self._own = self._own, None
        if own is not None:
            own.undo()

    def _end(self) -> dict[str, Any] | None:
        """The last line."""
        recorder = getattr(self, "recorder", None)
        if recorder is None:
            return None
        recorder.finish()
        end: dict[str, Any] = {"records": recorder.records, "calls": recorder.calls}
        if not recorder.records and recorder.left_out:
            steps = ",".join(map(str, sorted(self.steps or ())))
            self._warning = (
                f"got steps={steps[:80]!r}, and nothing was recorded in {self.path}: none of the "
                f"{recorder.left_out} calls of modules ran in such a step. Put the program's loop "
                "body into `with trace_step(i):`, or leave steps out."
            )
            logger.warning("%s", self._warning)
            end |= {"left_out": recorder.left_out, "note": self._warning}
        elif not recorder.records:
            self._warning = (
                f"nothing was recorded in {self.path}: no traced module was called with a tensor "
                "while it was attached."
            )
            logger.warning("%s", self._warning)
            end["note"] = self._warning
        return {"end": end}

    def _abandon(self) -> None:
        """Nothing of it is to stay: it could not be attached."""
        self.detach()
        self.recorder = None  # type: ignore[assignment]
        self.sink.__exit__(BaseException, BaseException(), None)
        self._undo()
        if self.path.is_file() and self.path.stat().st_size == 0:
            self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._close(3)
            return
        self.detach()  # the error of the block is the one to see; the trace's own are logged
        self.sink.__exit__(kind, error, traceback)
        self._undo()


def _without_scripted(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    scripted = [name for name, one in modules.items() if isinstance(one, torch.jit.ScriptModule)]
    if scripted:
        logger.warning(
            "%d scripted modules call no hooks and are not recorded, the first is %r",
            len(scripted),
            scripted[0],
        )
    return {name: one for name, one in modules.items() if name not in set(scripted)}


def _refuse_traced(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Raise TraceError, with the names on both sides, if any of the modules is traced."""
    for name, module in modules.items():
        hook: Any = ModuleHookManager.of(module).get(HOOK)
        if hook is None:
            continue
        part = "that" if module is model else f"whose part {name!r}, a {type(module).__name__},"
        place = f" as {hook.name!r}, a part of a {hook.recorder.model}," if hook.name else ""
        raise TraceError(
            f"got a {type(model).__name__} {part} is traced{place} into "
            f"{hook.recorder.sink.path} already, expected one trace at a time: close that one "
            "first, or trace the rest by naming its layers."
        )
