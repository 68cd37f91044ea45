"""Tracing a program that knows nothing of it: every model it calls, from its first call on.

While it is on, the outermost ``module(...)`` of each thread is looked at; a module that is not part
of a model traced already becomes one. Calls inside a model go their usual way. Where the program
called a part of a model first, as an encoder by itself, the model's trace begins with what was
recorded of the part, under the names that it has in the model.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.compiler import is_dynamo_compiling

from polyattn.errors import TraceError, near_matches
from polyattn.hooks.manager import ModuleHookManager
from polyattn.torch.internals import is_replica, unwrapped
from polyattn.trace.format.output import process_path
from polyattn.trace.recorders.torch.model_trace import HOOK, ActivationTrace
from polyattn.trace.recorders.torch.parts_called_first import Earlier, hook_of
from polyattn.trace.recorders.torch.perturbation import Perturbation, perturbation_of
from polyattn.trace.recorders.torch.what_to_record import Nothing, fitting, settled

__all__ = ["After", "Before", "LeftOut", "ProgramTrace", "trace_any"]

Before = Callable[[nn.Module], object]
After = Callable[[ActivationTrace], object]

logger = logging.getLogger("polyattn.trace")

_MOST = 64
"""Models of one program; more are rather layers that it calls one by one."""

_one = threading.Lock()


class LeftOut(NamedTuple):
    """A model of the program that is not traced: its class, and why not."""

    model: str
    reason: str


class ProgramTrace:
    """The traces of one program's models, in the order in which these were first called.

    `left_out`: the models that were called and are not traced.
    """

    def __init__(
        self,
        path: str | Path,
        options: dict[str, Any],
        before: Before | None = None,
        after: After | None = None,
    ) -> None:
        self.runs: list[ActivationTrace] = []
        self.left_out: list[LeftOut] = []
        self._path = process_path(path).absolute()  # models come later, when it may be elsewhere
        self._options = options
        self._before, self._after = before, after
        self._named: dict[ActivationTrace, Path] = {}
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._changing = threading.RLock()
        self._lacking: dict[str, list[Nothing]] = {"layers": [], "tensors": []}
        self._met: set[str] = set()

    @property
    def paths(self) -> list[Path]:
        """The files, that of the first model first."""
        return [run.path for run in self.runs]

    def meet(self, module: nn.Module) -> None:
        """Trace the model that begins with this module, unless it is traced."""
        if module in self._known:
            return
        with self._changing:
            model = unwrapped(module)  # of torch.compile
            if module in self._known or is_replica(module):
                return
            self._known.update((module, model))
            if not isinstance(model, nn.Module) or HOOK in ModuleHookManager.of(model):
                return
            # A loss or an activation that a program calls by itself is no model.
            if next(model.parameters(), None) is None and next(model.children(), None) is None:
                return
            self._trace(model)

    def _trace(self, model: nn.Module) -> None:
        options = self._fitting(model)
        if options is None:
            return
        parts, like = self._parts_of(model)
        if len(self.runs) - len(parts) >= _MOST:
            reason = f"{_MOST} models are traced, and the program seems to call layers one by one"
            if all(one.reason != reason for one in self.left_out):
                logger.warning(
                    "a %s is not traced, nor any model after it: %s", type(model).__name__, reason
                )
            self.left_out.append(LeftOut(type(model).__name__, reason))
            return
        if self._before is not None:
            self._before(model)
        try:
            for run in like:
                run.close()
            self._begin(model, options, parts)
        except TraceError as error:
            if not self.runs:
                raise  # nothing can be recorded, as the file or the options are wrong
            logger.warning("a %s is not traced: %s", type(model).__name__, error)
            self.left_out.append(LeftOut(type(model).__name__, str(error)))

    def _begin(
        self, model: nn.Module, options: dict[str, Any], parts: list[ActivationTrace]
    ) -> None:
        """Trace a model; of parts that were traced before, the trace goes on in the model's."""
        if not parts:
            path, at = self._file(model), len(self.runs)
            self.runs.append(ActivationTrace(model, path, **options))
        else:
            path, at = self._named[parts[0]], self.runs.index(parts[0])
            earlier = Earlier(model, parts, parts[0].path)
            try:
                run = ActivationTrace(model, path, **options, earlier=earlier)
            except BaseException:
                earlier.restore()
                raise
            earlier.remove()
            self.runs[at] = run
            self.runs = [one for one in self.runs if one not in parts]
            for part in parts:
                del self._named[part]
        self._named[self.runs[at]] = path
        if self._after is not None:
            self._after(self.runs[at])

    def _parts_of(self, model: nn.Module) -> tuple[list[ActivationTrace], list[ActivationTrace]]:
        """The traces of parts of a model; and of models that it has all the weights of, and more.

        None at all if anything else of the model is traced: then it cannot be.
        """
        modules = set(model.modules())
        runs = [one for one in self.runs if one.attached and not modules.isdisjoint(_modules(one))]
        parts = [one for one in runs if one.model in modules]
        like = [one for one in runs if one.model not in modules]
        weights = set(model.parameters())
        others = {hook.recorder for one in modules if (hook := hook_of(one)) is not None}
        others -= {one.recorder for one in runs}
        fits = not others and all(set(one.model.parameters()) < weights for one in like)
        for run in runs:
            run.flush()
            fits = fits and run.sink.error is None
        return (parts, like) if fits else ([], [])

    def _fitting(self, model: nn.Module) -> dict[str, Any] | None:
        """The options for a model; None for one that has none of the layers, which is left out."""
        options = dict(self._options)
        whole = self._lacks(model, "tensors")
        if whole is not None:
            options["tensors"] = None
        layers = self._lacks(model, "layers")
        if layers is None:
            return options
        if whole is None and options.get("tensors") is not None:
            return options | {"layers": options["tensors"]}
        self.left_out.append(LeftOut(type(model).__name__, str(layers.error())))
        return None

    def _lacks(self, model: nn.Module, argument: str) -> Nothing | None:
        """What is wrong with an option that chooses modules, where it fits nothing of a model."""
        if self._options.get(argument) is None:
            return None
        found = fitting(model, self._options[argument], argument)
        if not isinstance(found, Nothing):
            self._met.add(argument)
            return None
        if len(self._lacking[argument]) < _MOST:
            self._lacking[argument].append(found)
        return found

    def _file(self, model: nn.Module) -> Path:
        if not self.runs:
            return self._path
        name, taken = type(model).__name__, set(self._named.values())
        for number in itertools.count(1):
            more = f"-{number}" if number > 1 else ""
            path = self._path.with_name(f"{self._path.stem}.{name}{more}{self._path.suffix}")
            if path not in taken:
                break
        return path

    def close(self) -> None:
        """End all the traces; raises the first of their complaints.

        Raises TraceError too if `layers`, or `tensors`, chose nothing in any model.
        """
        errors = []
        for run in self.runs:
            try:
                run.close()
            except TraceError as error:
                errors.append(error)
        for argument, nothing in self._lacking.items():
            if nothing and argument not in self._met:
                errors.append(_chose_nothing(argument, nothing))
        if errors:
            raise errors[0]


def _modules(run: ActivationTrace) -> set[nn.Module]:
    return set(run.model.modules())


def _chose_nothing(argument: str, nothing: list[Nothing]) -> TraceError:
    """What to say where an option fits none of the program's models."""
    if len(nothing) == 1:
        return nothing[0].error()
    first, names = nothing[0], [name for one in nothing for name in one.modules if name]
    models = Counter(one.model for one in nothing)
    called = ", ".join(f"{n} of {one}" if n > 1 else one for one, n in models.items())
    have = dict.fromkeys(f"A {one.model} has {one.some}." for one in nothing)
    return TraceError(
        f"got {argument}={first.said}, which fits no module of the {len(nothing)} models that were "
        f"called ({called}).{near_matches(first.sought, dict.fromkeys(names))} "
        f"{' '.join(list(have)[:3])}"
    )


@contextmanager
def trace_any(
    path: str | Path,
    *,
    before: Before | None = None,
    after: After | None = None,
    perturb: int | Perturbation | None = None,
    **options: Any,
) -> Iterator[ProgramTrace]:
    """Trace every model that the program calls inside, without a change to it.

    The first goes to `path`; each further one has its class in the file's name, as
    ``run.AutoencoderKL.jsonl``. A model whose parts were called before has these records too, and
    the file of the first of them. `options` are those of :func:`polyattn.hooks.trace`. A model that
    has none of the `layers` is left out, as are modules without parameters and children, as losses;
    `tensors` may be in some of the models only. `before` is called with each model that is to be
    traced, before its first call, `after` with its trace, which is attached then. With `perturb`
    the weights are those from before when the block ends. Raises TraceError if another one is on,
    and at the end if `layers`, or `tensors`, fitted none of the models.

    >>> import tempfile, torch
    >>> model = nn.Linear(2, 2)
    >>> with trace_any(tempfile.mkdtemp() + "/run.jsonl") as traced:
    ...     _ = model(torch.ones(1, 2))
    >>> [path.name for path in traced.paths], traced.left_out
    (['run.jsonl'], [])
    """
    perturbation, own = perturbation_of(perturb)
    for name in ("layers", "tensors"):
        options[name] = settled(options.get(name))
    if not _one.acquire(blocking=False):
        raise TraceError("got a trace of the whole program inside another one, expected one.")
    found = ProgramTrace(path, options | {"perturb": perturbation}, before, after)
    try:
        with _calls_met(found):
            yield found
    except BaseException:
        _close_quietly(found)
        raise
    else:
        found.close()
    finally:
        if own is not None:
            own.undo()


@contextmanager
def _calls_met(found: ProgramTrace) -> Iterator[None]:
    """Look at each thread's outermost calls of modules."""
    original = nn.Module.__call__
    inside = threading.local()

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or getattr(inside, "a_model", False):
            return original(self, *args, **kwargs)
        found.meet(self)
        inside.a_model = True
        try:
            return original(self, *args, **kwargs)
        finally:
            inside.a_model = False

    try:
        nn.Module.__call__ = call  # type: ignore[method-assign,assignment]
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
        _one.release()


def _close_quietly(found: ProgramTrace) -> None:
    """The program's own error is the one to see."""
    try:
        found.close()
    except TraceError as error:
        logger.error("%s", error)
