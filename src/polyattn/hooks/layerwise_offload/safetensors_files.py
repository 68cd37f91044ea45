"""The model's own safetensors files as the home of its weights: nothing is written or copied.

The format: eight bytes, the length of a JSON header; the header, of each tensor its dtype, shape,
and first byte and end within what follows; the tensors. (github.com/huggingface/safetensors)
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.mapped import MappedFile

__all__ = ["SafetensorsFiles", "StoredTensor", "header_of"]

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}  # fmt: skip
_LONGEST_HEADER = 100_000_000
_INDEX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its kind, and the run of bytes that it is, contiguous."""

    name: str
    file: MappedFile
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class SafetensorsFiles:
    """The tensors of one or more files by name."""

    def __init__(self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.files: list[MappedFile] = []
        for path in _files(paths):
            file = MappedFile(path)
            self.files.append(file)
            for tensor in header_of(file):
                if tensor.name in self.tensors:
                    raise OffloadError(
                        f"got the tensor {tensor.name} in {file.path} and in "
                        f"{self.tensors[tensor.name].file.path}, expected each in one file"
                    )
                self.tensors[tensor.name] = tensor

    def named_for(self, names: Iterable[str]) -> Mapping[str, StoredTensor]:
        """Return the tensors under a model's names.

        A checkpoint of the model inside a task's model has its names without the first part
        (``model.``, ``transformer.``), or the other way round; the way that finds most is taken.
        """
        wanted = list(names)
        firsts = {name.partition(".")[0] + "." for name in (*wanted, *self.tensors)}
        ways = [{name: name for name in wanted}]
        ways += [{name: first + name for name in wanted} for first in sorted(firsts)]
        ways += [{name: name.removeprefix(first) for name in wanted} for first in sorted(firsts)]
        best = max(ways, key=lambda way: sum(stored in self.tensors for stored in way.values()))
        return {
            name: self.tensors[stored] for name, stored in best.items() if stored in self.tensors
        }

    def close(self) -> None:
        """Close the files; mappings stay."""
        for file in self.files:
            file.close()


def _files(paths: Any) -> list[Path]:
    if not isinstance(paths, str | os.PathLike):
        return [file for path in paths for file in _files(path)]
    path = Path(paths)
    if not path.is_dir():
        return [path]
    indexes = sorted(path.glob(f"*{_INDEX}"))
    if len(indexes) == 1:
        try:
            content = json.loads(indexes[0].read_text(encoding="utf-8"))
            return [path / name for name in sorted(set(content["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OffloadError(
                f"got {indexes[0]}, which is no index of safetensors files ({error}), expected "
                "weight_map: name the files themselves in weights="
            ) from error
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise OffloadError(
            f"got weights={str(path)!r}, a folder without safetensors files, expected some: "
            "save the model with safetensors, or leave weights= out and give disk= a folder"
        )
    return found


def header_of(file: MappedFile) -> list[StoredTensor]:
    """Read what a file holds, and check that it does."""
    try:
        length = _header_length(file)
        text = bytearray(length)
        file.read(8, memoryview(text))
        header = json.loads(bytes(text))
        found = [
            _stored(file, name, facts, 8 + length)
            for name, facts in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise OffloadError(
            f"got {file.path}, which is no safetensors file ({error}), expected one: "
            "look at the path, or save the model again"
        ) from error
    return found


def _header_length(file: MappedFile) -> int:
    if file.nbytes < 8:
        raise ValueError(f"{file.nbytes} bytes")
    start = bytearray(8)
    file.read(0, memoryview(start))
    (length,) = struct.unpack("<Q", start)
    if length > min(_LONGEST_HEADER, file.nbytes - 8):
        raise ValueError(f"a header of {length:,} bytes in a file of {file.nbytes:,}")
    return int(length)


def _stored(file: MappedFile, name: str, facts: dict[str, Any], base: int) -> StoredTensor:
    first, end = facts["data_offsets"]
    shape = tuple(int(n) for n in facts["shape"])
    if facts["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has the dtype {facts['dtype']}")
    dtype = _DTYPES[facts["dtype"]]
    count = 1
    for n in shape:
        count *= n
    if min(shape, default=0) < 0 or end - first != count * dtype.itemsize:
        raise ValueError(f"{name} is {facts['dtype']} {shape} in {end - first} bytes")
    if first < 0 or base + end > file.nbytes:
        raise ValueError(f"{name} ends at byte {base + end:,} of {file.nbytes:,}")
    return StoredTensor(name, file, base + first, end - first, dtype, shape)
