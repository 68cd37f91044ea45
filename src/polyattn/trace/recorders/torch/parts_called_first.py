"""What was recorded of parts of a model before the model was called, as records of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyattn.hooks.manager import ModuleHookManager
from polyattn.trace.format.output import tensor_folder
from polyattn.trace.format.record import line_of
from polyattn.trace.recorders.torch.model_trace import HOOK, ActivationTrace
from polyattn.trace.recorders.torch.recorder import Recorder
from polyattn.trace.recorders.torch.trace_hook import TraceHook

__all__ = ["Earlier", "hook_of"]

_BATCH = 256


class Earlier:
    """Ends traces of parts of a model, so that the model's own begins with what is in them.

    `hooks`: those of the parts' modules, by their names in the model. `path`: where the model's
    trace is to be; a part's file that is there is set aside. The parts' files stay until
    :meth:`remove`, so a process that is killed loses nothing.
    """

    def __init__(self, model: nn.Module, parts: Sequence[ActivationTrace], path: Path) -> None:
        names = {module: name for name, module in model.named_modules()}
        self.hooks: dict[str, TraceHook] = {}
        self._parts: list[tuple[Path, dict[str, str]]] = []
        self._moved: list[tuple[Path, Path]] = []
        self._whole = True
        for part in parts:
            known = {name: names[module] for name, module in part.model.named_modules()}
            for module in part.model.modules():
                hook = hook_of(module)
                if hook is not None and hook.recorder is part.recorder:
                    self.hooks[names[module]] = hook
            part.detach()
            part.sink.close()
            self._parts.append((self._aside(part.path) if part.path == path else part.path, known))

    def _aside(self, path: Path) -> Path:
        """Move a part's file and its whole tensors out of the way."""
        number = 0
        while (new := path.with_name(f"{path.stem}.earlier{number}{path.suffix}")).exists():
            number += 1
        for old, to in ((path, new), (tensor_folder(path), tensor_folder(new))):
            if old.exists():
                old.rename(to)
                self._moved.append((old, to))
        return new

    def write(self, recorder: Recorder) -> None:
        """Write the parts' records, one part after the other, under the model's names.

        The recorder goes on counting after them. To be called before it records anything.
        """
        sink, first, records = recorder.sink, 0, 0
        for path, names in self._parts:
            last, lines = first - 1, []
            for raw in _raw(path):
                if "end" in raw:
                    recorder.calls += raw["end"].get("calls", 0)
                    recorder.left_out += raw["end"].get("left_out", 0)
                    continue
                last, records = max(last, raw["seq"] + first), records + 1
                lines.append(_line(raw, names, first, path, sink.path))
                if len(lines) == _BATCH:
                    sink.extend(lines)
                    lines = []
            sink.extend(lines)
            first = last + 1
        recorder.go_on(first, records)
        self._whole = sink.error is None

    def remove(self) -> None:
        """Remove the parts' files: all that was in them is in the model's trace."""
        if not self._whole:
            return
        for path, _ in self._parts:
            path.unlink(missing_ok=True)
            if tensor_folder(path).is_dir() and not any(tensor_folder(path).iterdir()):
                tensor_folder(path).rmdir()

    def restore(self) -> None:
        """Have the parts' files under their own names again: there is no trace of the model."""
        for old, new in reversed(self._moved):
            if not old.exists():
                new.rename(old)


def hook_of(module: nn.Module) -> Any:
    """Return the hook by which a module is traced, None where it is not.

    >>> hook_of(nn.Linear(2, 2))
    """
    scripted = isinstance(module, torch.jit.ScriptModule)
    return None if scripted else ModuleHookManager.of(module).get(HOOK)


def _raw(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file that this process wrote, without the header."""
    with path.open("rb") as lines:
        next(lines)
        yield from map(json.loads, lines)


def _line(raw: dict[str, Any], names: dict[str, str], first: int, path: Path, to: Path) -> str:
    """The line of a record in the model's trace; a whole tensor is moved there."""
    raw |= {"seq": raw["seq"] + first, "module": names[raw["module"]]}
    if raw.get("same") is not None:
        raw["same"] += first
    if raw.get("file") is not None:
        old = tensor_folder(path) / Path(raw["file"]).name
        new = tensor_folder(to) / f"{int(old.stem) + first}{old.suffix}"
        new.parent.mkdir(exist_ok=True)
        if old.exists():  # it is that of several records
            old.rename(new)
        raw["file"] = f"{new.parent.name}/{new.name}"
    return line_of(raw)
