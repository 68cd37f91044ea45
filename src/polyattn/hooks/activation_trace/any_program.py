"""Tracing a program that knows nothing of it: every model it calls, from its first call on.

While it is on, the outermost ``module(...)`` of each thread is looked at; a module that is not part
of a model traced already becomes one. Calls inside a model go their usual way.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from polyattn.errors import TraceError
from polyattn.hooks.activation_trace.run import HOOK, ActivationTrace
from polyattn.hooks.manager import ModuleHookManager

__all__ = ["ProgramTrace", "trace_any"]

logger = logging.getLogger("polyattn.trace")

_MOST = 64
"""Models of one program; more are rather layers that it calls one by one."""

_one = threading.Lock()


class ProgramTrace:
    """The traces of one program's models, in the order in which these were first called."""

    def __init__(self, path: str | Path, options: dict[str, Any]) -> None:
        self.runs: list[ActivationTrace] = []
        self.left_out: list[str] = []
        self._path = Path(path)
        self._options = options
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._changing = threading.RLock()

    @property
    def paths(self) -> list[Path]:
        """The files, that of the first model first."""
        return [run.path for run in self.runs]

    def meet(self, module: nn.Module) -> None:
        """Trace the model that begins with this module, unless it is traced."""
        if module in self._known:
            return
        with self._changing:
            model = getattr(module, "_orig_mod", module)  # of torch.compile
            if module in self._known or getattr(module, "_is_replica", False):
                return
            self._known.update((module, model))
            if not isinstance(model, nn.Module) or HOOK in ModuleHookManager.of(model):
                return
            # A loss or an activation that a program calls by itself is no model.
            if next(model.parameters(), None) is None and next(model.children(), None) is None:
                return
            self._trace(model)

    def _trace(self, model: nn.Module) -> None:
        if len(self.runs) == _MOST:
            if not self.left_out:
                logger.warning(
                    "%d models are traced, and the next, a %s, is not, nor any after it: the "
                    "program seems to call layers one by one",
                    _MOST, type(model).__name__,
                )  # fmt: skip
            self.left_out.append(type(model).__name__)
            return
        try:
            self.runs.append(ActivationTrace(model, self._file(model), **self._options))
        except TraceError as error:
            if not self.runs and not self.left_out:
                raise  # nothing can be recorded, as the file or the options are wrong
            logger.warning("a %s is not traced: %s", type(model).__name__, error)
            self.left_out.append(type(model).__name__)

    def _file(self, model: nn.Module) -> Path:
        if not self.runs:
            return self._path
        name = type(model).__name__
        same = sum(type(run.model).__name__ == name for run in self.runs[1:])
        more = f"-{same + 1}" if same else ""
        return self._path.with_name(f"{self._path.stem}.{name}{more}{self._path.suffix}")

    def close(self) -> None:
        """End all the traces; raises the first of their complaints."""
        errors = []
        for run in self.runs:
            try:
                run.close()
            except TraceError as error:
                errors.append(error)
        if errors:
            raise errors[0]


@contextmanager
def trace_any(path: str | Path, **options: Any) -> Iterator[ProgramTrace]:
    """Trace every model that the program calls inside, without a change to it.

    The first goes to `path`; each further one has its class in the file's name, as
    ``run.AutoencoderKL.jsonl``. `options` are those of :func:`polyattn.hooks.trace`; `layers` has
    to match something in every model that is to be traced. Modules without parameters and children,
    as losses, are not. Raises TraceError if another one is on.

    >>> import tempfile, torch
    >>> model = nn.Linear(2, 2)
    >>> with trace_any(tempfile.mkdtemp() + "/run.jsonl") as traced:
    ...     _ = model(torch.ones(1, 2))
    >>> [path.name for path in traced.paths]
    ['run.jsonl']
    """
    if not _one.acquire(blocking=False):
        raise TraceError("got a trace of the whole program inside another one, expected one.")
    found = ProgramTrace(path, options)
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
        try:
            yield found
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]
            _one.release()
    except BaseException:
        _close_quietly(found)
        raise
    found.close()


def _close_quietly(found: ProgramTrace) -> None:
    """The program's own error is the one to see."""
    try:
        found.close()
    except TraceError as error:
        logger.error("%s", error)
