"""The whole tensors that a reference's run kept beside its trace, read one at a time."""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import MissingDependency, TraceError
from polyattn.trace.format.contents import Trace
from polyattn.trace.format.record import Record
from polyattn.trace.recorders.torch.full_tensors import KEY

__all__ = ["WholeTensors"]

_LIMIT = 256 << 20
_NOT_THERE = "is not there; keep the trace's .tensors folder beside it"


class WholeTensors:
    """Reads the tensors of a trace's records; the latest are remembered, `limit` bytes of them.

    Raises MissingDependency without the package safetensors.
    """

    def __init__(self, trace: Trace, limit: int = _LIMIT) -> None:
        if importlib.util.find_spec("safetensors") is None:
            raise MissingDependency(
                "got a trace with whole tensors, which needs the package safetensors to read them: "
                "pip install safetensors."
            )
        self._folder = Path(trace.paths[0]).parent if trace.paths else Path()
        self._limit, self._held = limit, 0
        self._latest: OrderedDict[str, Tensor] = OrderedDict()

    def check(self, records: Iterable[Record]) -> None:
        """Raise TraceError if the file of any of these is not there."""
        for record in records:
            if record.file is not None and not (self._folder / record.file).is_file():
                raise self._wrong(record, _NOT_THERE)

    def get(self, record: Record) -> Tensor:
        """Return the tensor of a record that has a file, on the CPU; not to be changed.

        Raises TraceError if the file is not there, is damaged, or is of another tensor.
        """
        assert record.file is not None
        found = self._latest.get(record.file)
        if found is None:
            found = self._read(record, record.file)
            self._latest[record.file] = found
            self._held += found.nbytes
            while self._held > self._limit and len(self._latest) > 1:
                self._held -= self._latest.popitem(last=False)[1].nbytes
        else:
            self._latest.move_to_end(record.file)
        if found.shape != record.shape or _name(found.dtype) != record.dtype:
            raise self._wrong(
                record,
                f"holds {_name(found.dtype)} of shape {tuple(found.shape)}, expected "
                f"{record.dtype} of shape {tuple(record.shape)}",
            )
        return found

    def _read(self, record: Record, file: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        path = self._folder / file
        if not path.resolve().is_relative_to(self._folder.resolve()):
            raise self._wrong(record, "leads out of the trace's folder")
        try:
            with safe_open(path, framework="pt") as opened:
                values: Tensor = opened.get_tensor(KEY)
                metadata: dict[str, Any] = opened.metadata() or {}
        except FileNotFoundError as error:
            raise self._wrong(record, _NOT_THERE) from error
        except (OSError, SafetensorError, ValueError) as error:
            raise self._wrong(record, f"cannot be read ({error})") from error
        if str(metadata.get("dtype", "")).startswith("complex"):
            pairs = values.dim() > 0 and values.shape[-1] == 2 and values.is_floating_point()
            if not pairs:
                raise self._wrong(record, "holds no complex numbers as pairs")
            values = torch.view_as_complex(values.contiguous())
        return values

    def _wrong(self, record: Record, reason: str) -> TraceError:
        return TraceError(
            f"got {self._folder / str(record.file)}, the tensor {record.tensor} ({record.phase}) "
            f"of {record.module or 'the model'!r}, which {reason}. Record the reference again."
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
