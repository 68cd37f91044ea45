"""Whole tensors beside the trace: one safetensors file for each, named by its record's `seq`.

The program's thread copies the tensor, the writing thread writes the file, complete or not at all,
before the record that names it. What waits to be written is bounded in bytes.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import MissingDependency, TraceError
from polyattn.trace.format.output import WAYS_OUT, tensor_folder

__all__ = ["KEY", "Saving", "TensorFolder"]

KEY = "tensor"
"""The name of the tensor in its file. Its dtype is in the file's metadata, for complex tensors are
stored as real ones with a last dimension of 2."""

_LIMIT = 1 << 30


class TensorFolder:
    """The folder ``run.tensors`` of a trace ``run.jsonl``.

    `limit`: bytes that may wait for the disk; a forward waits for room. Raises MissingDependency
    without the package safetensors, TraceError for a folder that has files of another run.
    """

    def __init__(self, trace: Path, *, overwrite: bool = False, limit: int = _LIMIT) -> None:
        if importlib.util.find_spec("safetensors") is None:
            raise MissingDependency(
                "got tensors=..., which needs the package safetensors to write whole tensors: "
                "pip install safetensors, or leave tensors out and record statistics only."
            )
        self.path = tensor_folder(trace)
        self._limit = limit
        self._waiting = 0
        self._room = threading.Condition()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            old = sorted(self.path.glob("*.safetensors"))
            if old and not overwrite:
                raise TraceError(
                    f"got the folder {self.path}, which holds {len(old)} tensors of another run, "
                    f"expected none. {WAYS_OUT}"
                )
            for file in old:
                file.unlink()
        except OSError as error:
            raise TraceError(
                f"got the folder {self.path}, which cannot be written ({error})."
            ) from error

    def save(self, t: Tensor, seq: int, given_up: Callable[[], bool]) -> Saving:
        """Copy a tensor for the file of record `seq`; waits while too much waits for the disk.

        `given_up`: whether the trace has ended, so that nothing is waited for. Raises TraceError
        for a tensor that is not dense.
        """
        values = t.detach()
        if values.layout is not torch.strided or values.is_quantized:
            kind = "quantised" if values.is_quantized else str(values.layout)
            raise TraceError(f"got one that is {kind}, expected a dense one")
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        size = values.numel() * values.element_size()
        with self._room:
            while self._waiting and self._waiting + size > self._limit and not given_up():
                self._room.wait(0.1)
            self._waiting += size
        try:
            with torch.inference_mode(False), torch.no_grad():
                copy, ready = _on_host(values)
            if size and not copy.data_ptr():
                raise TraceError(f"got a {type(t).__name__} that has no values of its own")
        except BaseException:
            self.done(size)
            raise
        return Saving(self, self.path / f"{seq}.safetensors", copy, ready, str(t.dtype), size)

    def done(self, size: int) -> None:
        """Make room for the next: so many bytes were written."""
        with self._room:
            self._waiting -= size
            self._room.notify_all()


def _on_host(values: Tensor) -> tuple[Tensor, Any]:
    """A contiguous copy on the host, and what to wait for before reading it."""
    if values.is_cuda:
        with torch.cuda.device(values.device):
            copy = torch.empty(values.shape, dtype=values.dtype).pin_memory()
            copy.copy_(values, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        return copy, ready
    if values.is_cpu:
        return values.clone(memory_format=torch.contiguous_format), None
    return values.cpu().contiguous(), None


class Saving:
    """A tensor on its way to the disk."""

    __slots__ = ("_copy", "_dtype", "_folder", "_path", "_ready", "_size")

    def __init__(
        self, folder: TensorFolder, path: Path, copy: Tensor, ready: Any, dtype: str, size: int
    ) -> None:
        self._folder, self._path, self._copy, self._ready = folder, path, copy, ready
        self._dtype, self._size = dtype, size

    @property
    def file(self) -> str:
        """The path as a record says it: below the trace's folder."""
        return f"{self._folder.path.name}/{self._path.name}"

    def write(self) -> None:
        """Write the file; OSError where the disk does not take it, and then there is none."""
        from safetensors.torch import save

        try:
            if self._ready is not None:
                self._ready.synchronize()
            metadata = {"dtype": self._dtype.removeprefix("torch.")}
            data = save({KEY: self._copy}, metadata)
            partial = self._path.with_suffix(".partial")
            try:
                partial.write_bytes(data)
                os.replace(partial, self._path)
            except OSError:
                partial.unlink(missing_ok=True)
                raise
        finally:
            self._folder.done(self._size)
